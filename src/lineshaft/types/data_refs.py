"""References to large data: `{"data": null, "data_ref": …, "size": …}` stands for an artifact's content.

Outputs, results of steps and checkpoints above a mebibyte are stored so. Whatever has this form is such a
reference; it is checked like any other reference to an artifact.
"""

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from lineshaft.types.artifacts import REF_PREFIX, artifact_id

#: Larger data is stored as an artifact.
MAX_INLINE_BYTES = 1 << 20
#: A longer JSON text is never a reference.
_LONGEST = 1_000


class DataRef(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    data: None = None
    data_ref: Annotated[str, Meta(pattern=f"^{REF_PREFIX}", max_length=500)]
    #: Bytes of JSON; None: not known yet.
    size: int | None = None

    @property
    def artifact_id(self) -> str:
        return artifact_id(self.data_ref)

    @property
    def json(self) -> bytes:
        return msgspec.json.encode(self)


_decode = msgspec.json.Decoder(DataRef).decode


def data_ref_in(json: bytes | None) -> DataRef | None:
    """The reference, if the JSON is one."""
    if json is None or len(json) > _LONGEST or b'"data_ref"' not in json:
        return None
    try:
        return _decode(json)
    except msgspec.MsgspecError:
        return None
