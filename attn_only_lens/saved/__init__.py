"""How models of each kind are taken apart into JSON and tensors, and built again from them."""

from attn_only_lens.saved.forms import Form, form_named, form_of
from attn_only_lens.saved.parts import Parts

__all__ = ["Form", "Parts", "form_named", "form_of"]
