from typing import Any

from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.urls import path
from shop.agents import mail
from shop.models import Order

from lineshaft.integrations.django import asubmit, submit


def buy(request: HttpRequest) -> HttpResponse:
    """ATOMIC_REQUESTS makes the view one transaction."""
    order = Order.objects.create(title=request.GET["title"])
    task = submit(mail.new(order=order.id), tags=["shop"])
    if request.GET["title"] == "fail":
        raise RuntimeError("after the submission")
    return HttpResponse(task.id)


@transaction.non_atomic_requests
async def buy_async(request: Any) -> HttpResponse:
    order = await Order.objects.acreate(title=request.GET["title"])
    task = await asubmit(mail.new(order=order.id))
    return HttpResponse(task.id)


urlpatterns = [path("buy", buy), path("buy-async", buy_async)]
