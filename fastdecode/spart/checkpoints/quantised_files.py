"""Quantised safetensors: compressed-tensors, GPTQ, AWQ, FP8 and NVFP4 checkpoints as matrices in 4 or 8 bits.

A module's weight is stored as several tensors, in the layouts that the tools publish:

    compressed-tensors  weight_packed int32 [out, in * bits / 32], or weight int8 or fp8 [out, in]; weight_scale
                        [out, groups], [out, 1] or [1]; weight_zero_point; weight_g_idx [in]
    gptq                qweight int32 [in * bits / 32, out], qzeros [groups, out * bits / 32], scales [groups, out],
                        g_idx [in]
    awq                 qweight int32 [in, out / 8], qzeros [groups, out / 8], scales [groups, out]; the eight numbers
                        of a word in the order of _AWQ_ORDER
    fp8                 weight fp8 [out, in]; weight_scale [], [1] or [out, 1], or weight_scale_inv, [] or one for
                        each block of a grid
    nvfp4               weight_packed uint8 [out, in / 2], two numbers of _FP4 each; weight_scale fp8 [out, in / 16];
                        weight_global_scale [1], which divides
    modelopt nvfp4      weight, weight_scale likewise; weight_scale_2 [], which multiplies

Numbers in 4 and 8 bits are kept as they are, FP8 and NVFP4 are rounded to 8 bits in groups of 32.
"""

from __future__ import annotations

from pathlib import Path

import torch

from fastdecode.spart.checkpoints.config import CheckpointError, Quantisation, TensorNames, first_line
from fastdecode.spart.checkpoints.tensors import SafetensorsCheckpoint
from fastdecode.spart.linears.quantised import GROUP, Quantised, unpack_pairs
from fastdecode.spart.linears.rounding import quantise

#: The tensor that shows that a module is quantised, first, and all others that may belong to it.
_TENSORS = {
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "awq": ("qweight", "qzeros", "scales"),
    "packed": ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "input_scale"),
    "nvfp4": ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"),
    "modelopt": ("weight", "weight_scale", "weight_scale_2", "input_scale"),
    "plain": (
        *("weight", "weight_scale", "weight_scale_inv", "weight_zero_point", "weight_g_idx"),
        *("input_scale", "activation_scale"),
    ),
}
#: Scales of activations, which are not read: we round these in smaller groups.
_OF_ACTIVATIONS = ("input_scale", "input_global_scale", "activation_scale")
#: `weight_scale_inv` stands in for `weight_scale`.
_MAY_LACK = ("g_idx", "weight_scale_inv", "weight_zero_point", "weight_g_idx", *_OF_ACTIVATIONS)
#: How the first tensor of a form is stored, in safetensors' spelling.
_STORED_AS = {"packed": ("I32",), "nvfp4": ("U8",), "modelopt": ("U8",), "plain": ("I8", "F8_E4M3")}
#: The numbers of NVFP4, then their negatives (E2M1; OCP Microscaling Formats 1.0, 5.3.3).
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4_GROUP = 16
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class QuantisedCheckpoint(SafetensorsCheckpoint):
    """A Hugging Face directory whose linears are quantised."""

    def __init__(self, directory: Path, names: TensorNames, quantisation: Quantisation):
        """Raises CheckpointError."""
        super().__init__(directory, names)
        self._how = quantisation
        self._forms = self._find()  # by the name of the weight

    def _find(self) -> dict[str, str]:
        """The form of each module's weight, a key of _TENSORS."""
        forms = [*_STORED_AS] if self._how.method not in ("gptq", "awq") else [self._how.method]
        found = {}
        for form in forms:
            for name in self.stored:
                module, _, end = name.rpartition(".")
                if end == _TENSORS[form][0] and self.stored[name].dtype in _STORED_AS.get(form, ("I32",)):
                    found[f"{module}.weight"] = form
        return found

    def names(self) -> set[str]:
        tensors = {self._tensor_name(name, end) for name, form in self._forms.items() for end in _TENSORS[form]}
        return set(self.stored) - tensors | set(self._forms)

    @staticmethod
    def _tensor_name(name: str, end: str) -> str:
        return f"{name.removesuffix('weight')}{end}"

    def shape(self, name: str) -> tuple[int, ...]:
        form = self._forms.get(name)
        if form is None:
            return super().shape(name)
        for end in _TENSORS[form]:
            if self._tensor_name(name, end) in self.stored or end in _MAY_LACK:
                continue
            if end != "weight_scale" or self._tensor_name(name, "weight_scale_inv") not in self.stored:
                raise CheckpointError(f"the checkpoint lacks the tensor {self._tensor_name(name, end)!r}")
        rows, columns = self._stored(name, _TENSORS[form][0])
        match form:
            case "gptq":
                return columns, rows * (32 // self._how.bits)
            case "awq":
                return columns * 8, rows
            case "packed":
                shape = tuple(int(size) for size in self._need(name, "weight_shape").flatten())
                if shape[:1] != (rows,):
                    packed = self._tensor_name(name, "weight_packed")
                    raise CheckpointError(f"tensor {packed!r} has {rows} rows, its weight_shape is {shape}")
                return shape
            case "nvfp4" | "modelopt":
                return rows, columns * 2
        return rows, columns

    def _stored(self, name: str, end: str) -> tuple[int, int]:
        shape = self.stored[self._tensor_name(name, end)].shape
        if len(shape) != 2:
            raise CheckpointError(f"tensor {self._tensor_name(name, end)!r} has shape {shape}, not two dimensions")
        return shape[0], shape[1]

    def tensor(self, name: str) -> torch.Tensor:
        """A small matrix that some checkpoints quantise, such as a router, is dequantised."""
        matrix = self.matrix(name)
        return matrix if isinstance(matrix, torch.Tensor) else matrix.dequantise()

    def matrix(self, name: str) -> torch.Tensor | Quantised:
        form = self._forms.get(name)
        if form is None:
            return super().matrix(name)
        try:
            match form:
                case "gptq":
                    return self._gptq(name)
                case "awq":
                    return self._awq(name)
                case "packed":
                    return self._packed(name)
                case "nvfp4":
                    return self._fp4(name, "weight_packed", 1 / self._need(name, "weight_global_scale").float())
                case "modelopt":
                    return self._fp4(name, "weight", self._need(name, "weight_scale_2").float())
            return self._plain(name)
        except CheckpointError:
            raise
        except (RuntimeError, IndexError, ValueError, ArithmeticError) as error:
            reason = first_line(error)
            raise CheckpointError(f"the quantised tensors of {name!r} do not fit together: {reason}") from None

    @property
    def quantisation(self) -> str | None:
        return self._how.method

    def _get(self, name: str, end: str) -> torch.Tensor | None:
        stored = self._tensor_name(name, end)
        return self.read(stored) if stored in self.stored else None

    def _need(self, name: str, end: str) -> torch.Tensor:
        tensor = self._get(name, end)
        if tensor is None:
            raise CheckpointError(f"the checkpoint lacks the tensor {self._tensor_name(name, end)!r}")
        return tensor

    def _gptq(self, name: str) -> Quantised:
        bits = self._how.bits
        q = _unpack(self._need(name, "qweight").T.contiguous(), bits)
        zeros = _unpack(self._need(name, "qzeros"), bits).T.int() + self._how.zero_offset
        scales = self._need(name, "scales").float().T
        order = self._need(name, "g_idx") if self._how.reordered else self._get(name, "g_idx")
        return self._make(q, scales, zeros, bits, order)

    def _awq(self, name: str) -> Quantised:
        # The i-th number of a word belongs to column _AWQ_ORDER[i] of its eight.
        order = torch.tensor(_AWQ_ORDER).argsort()
        q, zeros = (
            _unpack(self._need(name, end), 4).unflatten(1, (-1, 8))[:, :, order] for end in ("qweight", "qzeros")
        )
        scales = self._need(name, "scales").float().T
        return self._make(q.flatten(1).T.contiguous(), scales, zeros.flatten(1).T.int(), 4, None)

    def _packed(self, name: str) -> Quantised:
        outs, ins = self.shape(name)
        words = self._need(name, "weight_packed")
        bits = words.shape[1] * 32 // ins
        if bits not in (4, 8):
            raise CheckpointError(
                f"tensor {self._tensor_name(name, 'weight_packed')!r} packs {ins} numbers in {words.shape[1]} words"
            )
        q = _unpack(words, bits)[:, :ins].contiguous()
        scales = self._need(name, "weight_scale").float()
        zeros = self._get(name, "weight_zero_point")
        if zeros is not None:  # packed along the outputs
            zeros = _unpack(zeros.T.contiguous(), bits).T[:outs].int()
        return self._make(q, scales, zeros, bits, self._get(name, "weight_g_idx"))

    def _fp4(self, name: str, end: str, whole: torch.Tensor) -> Quantised:
        numbers = torch.tensor([*_FP4, *(-x for x in _FP4)])
        packed, scales = self._need(name, end), self._need(name, "weight_scale").float() * whole.reshape(())
        values = numbers[unpack_pairs(packed).int()]
        by_group = values.unflatten(1, (-1, _FP4_GROUP)) * scales[:, :, None]
        return quantise(by_group.flatten(1), 8, self._how.activation_bits)

    def _plain(self, name: str) -> Quantised:
        weight = self._need(name, "weight")
        grid = self._get(name, "weight_scale_inv")
        scales = (self._need(name, "weight_scale") if grid is None else grid).float()
        if weight.dtype is not torch.int8:
            outs, ins = weight.shape
            return quantise(weight.float() * _spread(scales, outs, ins, self._how.block), 8, self._how.activation_bits)
        q = weight.view(torch.uint8) ^ 128  # from -128 ... 127 to 0 ... 255
        scales = scales.reshape(-1, 1).expand(len(weight), 1) if scales.numel() in (1, len(weight)) else scales
        zeros = self._get(name, "weight_zero_point")
        if zeros is not None:
            zeros = (zeros.reshape(-1, 1) if zeros.numel() in (1, len(weight)) else zeros).int() + 128
            zeros = zeros.expand(scales.shape)
        return self._make(q, scales, zeros, 8, self._get(name, "weight_g_idx"))

    def _make(
        self, q: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, bits: int, g_idx: torch.Tensor | None
    ) -> Quantised:
        """q [out, in] and its scales and zero points [out, groups]. `g_idx` [in]: the group of each input."""
        outs, ins = q.shape
        groups = scales.shape[1]
        if scales.shape[0] != outs or (zeros is not None and zeros.shape != scales.shape):
            raise ValueError(f"numbers {tuple(q.shape)}, scales {tuple(scales.shape)}")
        size = -(-ins // groups)
        if groups > 1 and self._how.group is not None:
            size = self._how.group
        elif groups > 1 and size % 16:  # no tool makes such groups, so the last group is cut off
            size = -(-size // GROUP) * GROUP
        if -(-ins // size) != groups:
            raise ValueError(f"{groups} groups of {size}, {ins} inputs")
        middle = 1 << (bits - 1)
        mins = None if zeros is None or bool((zeros == middle).all()) else scales * (middle - zeros)
        order = None
        if g_idx is not None and not torch.equal(g_idx.long(), torch.arange(ins) // size):
            g_idx = g_idx.long()
            if int(g_idx.min()) < 0 or int(g_idx.max()) >= groups:
                raise ValueError(f"groups from {int(g_idx.min())} to {int(g_idx.max())}, there are {groups}")
            order = g_idx.argsort(stable=True)
            if not torch.equal(g_idx[order], torch.arange(ins) // size):  # groups of different sizes
                values = scales[:, g_idx] * (q.float() - middle) + (0 if mins is None else mins[:, g_idx])
                return quantise(values, 8, self._how.activation_bits)
            q = q[:, order]
        scales = scales.contiguous()
        if groups == 1:
            size = -(-ins // GROUP) * GROUP
        matrix = Quantised(q, scales, mins, middle, bits, size, self._how.activation_bits, order)
        if size % GROUP:  # the kernels have no such groups
            return quantise(matrix.dequantise(), 8, self._how.activation_bits)
        return matrix


def _unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [n, m] -> uint8 [n, m * 32 / bits]; the first number of a word is in its lowest bits."""
    if words.dtype is not torch.int32:
        raise CheckpointError(f"packed numbers are stored as {words.dtype}, not as int32")
    data = words.contiguous().view(torch.uint8)  # little-endian, like the file
    if bits == 8:
        return data
    return unpack_pairs(data)


def _spread(scales: torch.Tensor, outs: int, ins: int, block: tuple[int, int] | None) -> torch.Tensor:
    """Scales of a matrix, of its rows or of the blocks of a grid -> a tensor that multiplies [outs, ins]. `block` None:
    the shapes tell the size of the blocks."""
    if scales.numel() == 1:
        return scales.reshape(1, 1)
    if scales.ndim == 1:
        scales = scales[:, None]
    rows, columns = -(-outs // scales.shape[0]), -(-ins // scales.shape[1])
    if block is not None and scales.shape != (outs, 1):
        rows, columns = block
    else:  # blocks are powers of two, the last of a row or column may be cut off
        rows, columns = (size if size == 1 else 1 << (size - 1).bit_length() for size in (rows, columns))
        columns = ins if scales.shape[1] == 1 else columns
    if scales.shape != (-(-outs // rows), -(-ins // columns)):
        raise ValueError(f"numbers {(outs, ins)}, scales {tuple(scales.shape)}")
    return scales.repeat_interleave(rows, 0)[:outs].repeat_interleave(columns, 1)[:, :ins]
