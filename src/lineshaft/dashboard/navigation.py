"""The links of the navigation, each with what needs a person there."""

Link = tuple[str, str, str, str]


def links() -> list[Link]:
    """Address, label, count, and what is counted."""
    return [
        ("/", "Overview", "", ""),
        ("/tasks", "Tasks", "", ""),
        ("/dags", "DAGs", "", ""),
        ("/dead-letters", "Dead letters", "", ""),
        ("/approvals", "Approvals", "", ""),
        ("/agents", "Agents", "", ""),
        ("/guards", "Guards", "", ""),
        ("/sources", "Sources", "", ""),
        ("/costs", "Costs", "", ""),
        ("/new", "New", "", ""),
    ]
