"""Compare a model whose neurons are heads with the model that it was."""

from attn_only_lens.verify.compare import verify
from attn_only_lens.verify.report import Verification

__all__ = ["Verification", "verify"]
