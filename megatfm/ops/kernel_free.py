"""Names of torch's operators that launch no kernel, for those who count kernels."""

KERNEL_FREE = {
    "view", "_unsafe_view", "view_as", "t", "transpose", "expand", "detach", "detach_", "alias", "slice", "select",
    "split", "split_with_sizes", "chunk", "as_strided", "unsqueeze", "squeeze", "permute", "movedim", "unfold",
    "diagonal", "unbind", "_reshape_alias", "lift_fresh", "empty", "empty_like", "empty_strided", "new_empty",
    "new_empty_strided", "device", "promote_types", "is_same_size", "wait_tensor",
}  # fmt: skip
"""Views, uninitialised memory, and questions about a tensor."""
