"""parse_quantisation: reads config.json's `quantization_config`, which describes the weights. Imports no torch."""

from __future__ import annotations

from typing import Any

from fastdecode.spart.checkpoints.config import CheckpointError, Quantisation, WrongValue

#: `quant_method`s that the native decoder reads.
METHODS = ("compressed-tensors", "gptq", "awq", "fp8", "fbgemm_fp8", "mxfp4", "modelopt", "fastdecode")
#: Formats of compressed-tensors that are read.
_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized")
#: `quant_algo`s of NVIDIA's ModelOpt that are read.
_MODELOPT = ("NVFP4", "FP8")


def parse_quantisation(raw: dict[str, Any]) -> Quantisation | None:
    """`raw` is `quantization_config`; empty: the weights are not quantised.

    Raises CheckpointError for a method or format that is not read, by name.
    """
    if not raw:
        return None
    method = raw.get("quant_method")
    if method not in METHODS:
        raise CheckpointError(
            f"the checkpoint is quantised by {method!r}, which is not supported; known are {', '.join(METHODS)}"
        )
    match method:
        case "gptq":
            form = _known(raw.get("checkpoint_format", "gptq"), ("gptq", "gptq_v2"), "GPTQ format")
            return Quantisation(
                method,
                _bits(raw, (4, 8)),
                zero_offset=0 if form == "gptq_v2" else 1,
                group=None if raw.get("dynamic") else _group(raw),  # "dynamic" names modules with groups of their own
                reordered=raw.get("desc_act") is True,
            )
        case "awq":
            version = str(raw.get("version", "gemm")).lower()
            if version != "gemm":
                raise CheckpointError(f"the checkpoint's AWQ version {version!r} is not supported; known is 'gemm'")
            return Quantisation(method, _bits(raw, (4,)), group=_group(raw))
        case "modelopt":
            _known(raw.get("quant_algo"), _MODELOPT, "ModelOpt algorithm")
            return Quantisation(method)
        case "fastdecode":
            bits = _known(raw.get("activation_bits"), (8, 15), "bits of activations")
            return Quantisation(method, activation_bits=bits)
        case "compressed-tensors":
            return _compressed_tensors(raw)
        case _:
            return Quantisation(method, block=_block(raw, "weight_block_size"))


def _known(value: Any, known: tuple[Any, ...], what: str) -> Any:
    """A value that is `known`. Raises CheckpointError for another one."""
    if value not in known:
        listed = ", ".join(map(str, known))
        raise CheckpointError(f"the checkpoint's {what} {value!r} is not supported; known are {listed}")
    return value


def _group(raw: dict[str, Any]) -> int | None:
    """The inputs of a group. -1 and an absent number mean that all inputs are one, or that the tensors tell."""
    size = raw.get("group_size", raw.get("q_group_size"))
    if size in (None, -1):
        return None
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise WrongValue(f"the checkpoint is quantised in groups of {size!r}")
    return size


def _block(raw: dict[str, Any], name: str) -> tuple[int, int] | None:
    """The outputs and inputs of a block. A text, as old versions of compressed-tensors write it, is left aside."""
    block = raw.get(name)
    if block is None or isinstance(block, str):
        return None
    if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise WrongValue(f"the checkpoint's {name} is {block!r}, not two sizes")
    return block[0], block[1]


def _bits(raw: dict[str, Any], known: tuple[int, ...]) -> int:
    bits = raw.get("bits", raw.get("w_bit"))
    if bits not in known:
        by, listed = raw["quant_method"], ", ".join(map(str, known))
        raise CheckpointError(f"the checkpoint is quantised to {bits!r} bits by {by}; known are {listed}")
    return int(bits)


def _compressed_tensors(raw: dict[str, Any]) -> Quantisation:
    name = raw["quant_method"]
    form = _known(raw.get("format"), _FORMATS, f"{name} format")
    sparsity = raw.get("sparsity_config") or {}
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        raise CheckpointError(f"the checkpoint's weights are sparse ({name}), which is not supported")
    if raw.get("transform_config"):
        raise CheckpointError(f"the checkpoint rotates its weights ({name}, transform_config), which is not supported")
    groups = raw.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise CheckpointError(f"the checkpoint's {name} configuration has no config_groups")
    rounded, sizes, blocks = False, set(), set()
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise CheckpointError(f"the checkpoint's {name} configuration has a group without weights")
        kind = (weights.get("type", "int"), weights.get("num_bits"))
        if kind not in (("int", 4), ("int", 8), ("float", 8)) and (form, *kind) != ("nvfp4-pack-quantized", "float", 4):
            raise CheckpointError(
                f"the checkpoint's weights are {kind[0]} of {kind[1]} bits ({name}), not int4, int8, fp8 or nvfp4"
            )
        sizes.add(_group(weights))
        blocks.add(_block(weights, "block_structure"))
        inputs = group.get("input_activations")
        rounded |= isinstance(inputs, dict) and (inputs.get("type", "int"), inputs.get("num_bits")) == ("int", 8)
    return Quantisation(
        name,
        activation_bits=8 if rounded else 15,
        group=sizes.pop() if len(sizes) == 1 else None,
        block=blocks.pop() if len(blocks) == 1 else None,
    )
