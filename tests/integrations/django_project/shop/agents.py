from lineshaft import Agent
from shop.models import Order

agent = Agent("mailer")


@agent.task("mail")
def mail(order: int) -> str:
    found = Order.objects.get(id=order)
    found.mailed = True
    found.save()
    return found.title


@agent.task("count")
async def count() -> int:
    return await Order.objects.acount()
