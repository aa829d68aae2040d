"""Apply the expansions in `attn_only_lens.growth` to models of all supported kinds."""

from attn_only_lens.growth.models._grow import Grown, grow, identity, read
from attn_only_lens.growth.models.grown_folder import read_provenance

__all__ = ["Grown", "grow", "identity", "read", "read_provenance"]
