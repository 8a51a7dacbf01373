"""What other programs of OfficePlane (document 003) see of Lineshaft in Redis: document locks and progress.

Every process with the database uses it, so it is below the server, unlike OfficePlane's API. It may import
the engine and `integrations/redis`. State, dispatch and OfficePlane's API are not its business.
"""
