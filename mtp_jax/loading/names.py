"""Names of tensors: those of checkpoints that wrap a text model, and the text model's own."""

_WRAPPED = ("model.language_model.", "language_model.model.")  # the text model inside a larger one
_OUTER_HEAD = "language_model.lm_head."
_OTHER_PARTS = (
    "model.visual.",
    "visual.",
    "model.vision_tower.",
    "vision_tower.",
    "model.multi_modal_projector.",
    "multi_modal_projector.",
)


def canonical_name(name: str) -> str | None:
    """The name in a checkpoint of the text model alone; None for tensors of images and video.

    >>> canonical_name("model.language_model.layers.3.mlp.up_proj.weight")
    'model.layers.3.mlp.up_proj.weight'
    >>> canonical_name("mtp.fc.weight")
    'mtp.fc.weight'
    """
    for prefix in _WRAPPED:
        if name.startswith(prefix):
            return "model." + name.removeprefix(prefix)
    if name.startswith(_OUTER_HEAD):
        return "lm_head." + name.removeprefix(_OUTER_HEAD)
    return None if name.startswith(_OTHER_PARTS) else name
