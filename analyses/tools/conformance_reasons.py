"""The reasons why some of TransformerLens' tests must fail on our models."""

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["INHERENT", "Inherent"]


@dataclass(frozen=True)
class Inherent:
    """A reason, and the tests that it explains.

    Attributes:
        why: the reason, for the page.
        tests: by layout, node ids of tests, or of the modules and classes that contain them.
    """

    why: str
    tests: Mapping[str, tuple[str, ...]]

    @staticmethod
    def matches(named: str, test: str) -> bool:
        """Return whether a node id belongs to a named test, module or class, or is a case of it."""
        return test == named or test.startswith((f"{named}::", f"{named}["))

    def covers(self, test: str, layout: str) -> bool:
        """Return whether the reason explains this test."""
        return any(self.matches(named, test) for named in self.tests.get(layout, ()))


_INTEGRATION = "tests/integration"
_BRIDGE = f"{_INTEGRATION}/model_bridge"
_UNIT = "tests/unit/model_bridge"

INHERENT = (
    Inherent(
        "It asserts logits equal to the last bit while every hook is live: those of neurons that "
        "are computed as heads agree to rounding.",
        {
            "exposed": (
                f"{_BRIDGE}/test_granite_embedding_decomposition.py::"
                "test_embedding_hook_exposes_residual_contribution_without_changing_forward",
                f"{_BRIDGE}/test_parent_module_traversal.py::"
                "test_dtype_conversion_updates_unmapped_leaf_parameters",
            )
        },
    ),
    Inherent(
        "It replaces the blocks of a model, with their exposed MLPs, by one without, and then "
        "turns on the results of heads.",
        {
            "exposed": (
                f"{_UNIT}/test_config_flag_assignment.py::"
                "test_direct_assignment_preserves_unsupported_architecture_errors[use_attn_result]",
            )
        },
    ),
    Inherent(
        "It counts layers, by a key of the cache or where to stop: a converted model has two "
        "blocks for each.",
        {
            "converted": (
                f"{_INTEGRATION}/test_start_at_layer.py::test_start_at_final",
                f"{_INTEGRATION}/test_stop_at_layer.py::test_stop_at_final",
            )
        },
    ),
    Inherent(
        "It asserts that keys of no block are zero: those of neuron-heads are.",
        {
            "converted": (
                "tests/unit/pretrained_weight_conversions/test_olmo3.py::TestOlmo3StateDictLoads::"
                "test_converted_dict_loads_with_nonzero_kv",
            )
        },
    ),
)
