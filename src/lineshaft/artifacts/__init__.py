"""The artifact store: contents by their SHA-256, in a folder or on S3. It knows no database."""

from lineshaft.artifacts.location import open_store
from lineshaft.artifacts.store import Store, content_key

__all__ = ["Store", "content_key", "open_store"]
