"""Quantised parameters: packing and unpacking against a plain oracle, and a model that is for reading only."""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from tests.four_bits import values_of
from tiered import ManifestError, MisuseError, TieredStore, zero
from tiered.packing import form
from tiered.packing.float8 import FLOATS8, Float8
from tiered.packing.form import Loss, Packing, has_kernels
from tiered.packing.integers import Int8Largest
from tiered.packing.mxfp4 import Mxfp4
from tiered.packing.quantised import FORMS, TYPES, packing_of, packing_where_fit
from tiered.packing.table4 import form_by_table
from tiered.store.at_rest import StoreAtRest
from tiered.zero.checkpoint.checkpoint import read_record, write_record
from tiered.zero.checkpoint.safetensors import export_at_rest

FORM = {"int8": "int8 by row, float32 scales", "int4": "int4 by 32, bfloat16 scales", "nf4": form_by_table(True)}
BIT_PATTERN = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def packing(quantize: str, rows: int, columns: int) -> Packing:
    found = FORMS[FORM[quantize]].of(rows, columns)
    assert found is not None
    return found


def single(value: float) -> float:
    """Round to float32, ties to even."""
    try:
        found: float = struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)
    return found


def bfloat16(value: float) -> int:
    """Return the bits of a finite float32 rounded to bfloat16, ties to even."""
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    kept, rest = bits >> 16, bits & 0xFFFF
    return kept + (rest > 0x8000 or (rest == 0x8000 and kept & 1 == 1))


def oracle(quantize: str, packed: bytes, rows: int, columns: int, dtype: torch.dtype) -> list[int]:
    """Unpack one element after the other, as the docstrings of ``packing`` says it; the bits of each."""
    found = []
    groups = -(-columns // 32)
    codes_nbytes = rows * columns if quantize == "int8" else rows * groups * 16
    scales_at = -(-codes_nbytes // 64) * 64
    for row in range(rows):
        for column in range(columns):
            if quantize == "int8":
                (code,) = struct.unpack_from("<b", packed, row * columns + column)
                (scale,) = struct.unpack_from("<f", packed, scales_at + 4 * row)
            else:
                group, inside = row * groups + column // 32, column % 32
                byte = packed[group * 16 + inside % 16]
                code = (byte & 15 if inside < 16 else byte >> 4) - 8
                (high,) = struct.unpack_from("<H", packed, scales_at + 2 * group)
                (scale,) = struct.unpack("<f", struct.pack("<I", high << 16))
            value = single(code * scale)
            if dtype is torch.float32:
                found.append(struct.unpack("<i", struct.pack("<f", value))[0])
            elif dtype is torch.bfloat16:
                found.append((bfloat16(value) ^ 0x8000) - 0x8000)
            else:
                found.append(struct.unpack("<h", struct.pack("<e", value))[0])
    return found


@pytest.fixture(params=["C", "torch"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(form, "lib", None)
    elif not has_kernels():
        pytest.skip("the kernels were not built")
    return str(request.param)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same bits, of which any NaN is one."""
    either = torch.where(other.isnan() & one.isnan(), other, one)
    return torch.equal(either.view(BIT_PATTERN[one.dtype]), other.view(BIT_PATTERN[one.dtype]))


def unpacked(way: Packing, packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.full((way.rows * way.columns + 1,), float("nan"), dtype=dtype)
    way.unpack(packed, out[:-1])
    assert out[-1].isnan(), "it wrote past the end"
    return out[:-1]


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    quantize=st.sampled_from(["int8", "int4"]),
    rows=st.integers(1, 7),
    columns=st.integers(32, 600).filter(lambda columns: columns < 300 or columns % 16 < 2),
    dtype=st.sampled_from(TYPES),
    exponent=st.integers(-148, 14),
    seed=st.integers(0, 1000),
)
def test_values_are_those_of_the_oracle(
    kernel: str, quantize: str, rows: int, columns: int, dtype: torch.dtype, exponent: int, seed: int
) -> None:
    """Odd shapes, rows that end within a group, magnitudes from subnormal ones on, rows of zeros."""
    torch.manual_seed(seed)
    values = (torch.randn(rows, columns, dtype=torch.float64) * 2.0**exponent).clamp(-60000, 60000).to(dtype)
    values[seed % rows] *= seed % 3 > 0
    values[:, ::5] = 0
    way = packing(quantize, rows, columns)
    packed = torch.full((way.nbytes,), 0xAB, dtype=torch.uint8)
    loss = way.pack(values.view(-1), packed, "w")
    found = unpacked(way, packed, dtype)
    assert found.view(BIT_PATTERN[dtype]).tolist() == oracle(quantize, packed.numpy().tobytes(), rows, columns, dtype)
    wide, given_values = found.double(), values.view(-1).double()
    assert math.isclose(loss.error, float((wide - given_values).square().sum()), rel_tol=1e-9)
    assert math.isclose(loss.given, float(given_values.square().sum()), rel_tol=1e-9)
    again = torch.zeros(way.nbytes, dtype=torch.uint8)
    way.pack(values.view(-1), again, "w")
    assert torch.equal(packed, again), "packing leaves bytes as they were"


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("dtype", TYPES)
def test_any_bytes_are_unpacked_alike(quantize: str, dtype: torch.dtype) -> None:
    """Large shapes, whose rows are longer than what either kernel has at a time; every code, every kind of scale but NaN."""
    if not has_kernels():
        pytest.skip("the kernels were not built")
    torch.manual_seed(0)
    for rows, columns in ((1, 300_001), (700, 513), (33, 4096), (257, 1056)):
        way = packing(quantize, rows, columns)
        packed = torch.randint(0, 256, (way.nbytes,), dtype=torch.uint8)
        codes, scales = way.parts(packed)
        scales.copy_(torch.randn(scales.shape) * 2.0 ** torch.randint(-126, 12, scales.shape))
        if quantize == "int8":
            codes.clamp_(min=-127)
        in_c = unpacked(way, packed, dtype)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(form, "lib", None)
            in_torch = unpacked(way, packed, dtype)
        assert torch.equal(in_c.view(BIT_PATTERN[dtype]), in_torch.view(BIT_PATTERN[dtype]))


def nf4_oracle(packed: bytes, elements: int) -> list[float]:
    """Unpack one element after the other, as the docstring of ``DoubleTable4`` says it."""
    blocks = elements // 64
    coded_at = -(-elements // 2 // 64) * 64
    table_at = coded_at + -(-blocks // 4) * 4
    nested_at = table_at + 4 * 16
    added_at = nested_at + 4 * -(-blocks // 256)

    def number(at: int) -> float:
        found: float = struct.unpack_from("<f", packed, at)[0]
        return found

    found = []
    for i in range(elements):
        block = i // 64
        step = number(added_at + 4 + 4 * packed[coded_at + block])
        largest = single(single(step * number(nested_at + 4 * (block // 256))) + number(added_at))
        code = packed[i // 2] >> 4 if i % 2 == 0 else packed[i // 2] & 15
        found.append(single(number(table_at + 4 * code) * largest))
    return found


@pytest.mark.parametrize(("rows", "columns"), [(1, 64), (3, 64), (5, 128), (64, 48), (257, 64), (150, 320)])
def test_nf4_is_unpacked_as_it_is_described(rows: int, columns: int) -> None:
    torch.manual_seed(rows)
    way = packing("nf4", rows, columns)
    packed = torch.randint(0, 256, (way.nbytes,), dtype=torch.uint8)
    numbers = packed[way.nbytes - 4 * (-(-way.rows // 256) + 1 + 16 + 256) :].view(torch.float32)
    numbers.copy_(torch.randn(numbers.shape) * 2.0 ** torch.randint(-30, 4, numbers.shape))
    expected = torch.tensor(nf4_oracle(packed.numpy().tobytes(), rows * columns), dtype=torch.float32)
    for dtype in TYPES:
        found = [unpacked(way, packed, dtype)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(form, "lib", None)
            found.append(unpacked(way, packed, dtype))
        for one in found:
            assert torch.equal(one.view(BIT_PATTERN[dtype]), expected.to(dtype).view(BIT_PATTERN[dtype]))


def float8(code: int, exponents: int) -> float:
    """Return the value of a float of 8 bits with so many bits of exponent. Of 4 there is no infinity, and the largest code is
    NaN; of 5 all is as IEEE 754 has it."""
    mantissas, bias = 7 - exponents, 2 ** (exponents - 1) - 1
    exponent, mantissa = (code & 127) >> mantissas, code & (1 << mantissas) - 1
    share = mantissa / (1 << mantissas)
    value = (1 + share) * 2.0 ** (exponent - bias) if exponent else share * 2.0 ** (1 - bias)
    if exponents == 5 and exponent == 31:
        value = math.nan if mantissa else math.inf
    elif exponents == 4 and code & 127 == 127:
        value = math.nan
    return math.copysign(value, -1.0 if code & 128 else 1.0)


@pytest.mark.parametrize(("rows", "columns"), [(1, 32), (3, 300), (150, 160), (65, 257)])
@pytest.mark.parametrize(
    "way",
    [
        *(one for one in FLOATS8 if one.element is torch.float8_e4m3fn and one.block in ((128, 128), (64, 256))),
        *(one for one in FLOATS8 if one.element is torch.float8_e5m2 and one.block in ((1, None), (None, None), (1, 32))),
    ],
)
def test_floats_of_8_bits_are_unpacked_as_they_are_described(way: type[Float8], rows: int, columns: int) -> None:
    """Every code; scales from tiny ones on, with infinity and NaN among them; blocks that a matrix does not fill."""
    torch.manual_seed(rows)
    one = way(rows, columns)
    assert FORMS[way.form] is way
    packed = torch.randint(0, 256, (one.nbytes,), dtype=torch.uint8)
    squares = one.squares(packed)
    squares.copy_(torch.randn(squares.shape) * 2.0 ** torch.randint(-30, 4, squares.shape))
    if squares.numel() > 2:
        squares.view(-1)[:2] = torch.tensor([math.inf, math.nan])
    values = [float8(code, 4 if way.element is torch.float8_e4m3fn else 5) for code in range(256)]
    codes, scales, expected = packed[: rows * columns].tolist(), squares.tolist(), torch.empty(rows * columns)
    for i, code in enumerate(codes):
        row, column = divmod(i, columns)
        expected[i] = single(values[code] * scales[row // (way.down or rows)][column // (way.along or columns)])
    for dtype in TYPES:
        found = [unpacked(one, packed, dtype)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(form, "lib", None)
            found.append(unpacked(one, packed, dtype))
        assert all(same_bits(each, expected.to(dtype)) for each in found)


@pytest.mark.parametrize(("rows", "columns"), [(1, 32), (5, 96), (256, 64), (3, 4096)])
def test_floats_of_4_bits_are_unpacked_as_they_are_described(rows: int, columns: int) -> None:
    """Every code and every scale, of which the largest is no float32, while 0 and half of it are."""
    torch.manual_seed(rows)
    way = FORMS[Mxfp4.form].of(rows, columns)
    assert way is not None
    packed = torch.randint(0, 256, (way.nbytes,), dtype=torch.uint8)
    scales = way.parts(packed)[1]
    scales.copy_(torch.arange(scales.numel()))
    packed[: way.codes_nbytes][: min(256, way.codes_nbytes)] = torch.arange(256, dtype=torch.uint8)[: way.codes_nbytes]
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    values += [-value for value in values]
    powers = [2.0**-127 if code == 0 else math.inf if code == 255 else 2.0 ** (code - 127) for code in range(256)]
    assert form.powers(torch.arange(256, dtype=torch.uint8)).tolist() == powers
    powers[255] = 2.0**128
    expected = torch.empty(rows * columns)
    for i in range(rows * columns):
        byte = int(packed[i // 2])
        expected[i] = single(values[byte >> 4 if i % 2 else byte & 15] * powers[int(scales[i // 32])])
    for dtype in TYPES:
        found = [unpacked(way, packed, dtype)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(form, "lib", None)
            found.append(unpacked(way, packed, dtype))
        assert all(same_bits(one, expected.to(dtype)) for one in found)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(96, 128), (64, 48), (300, 64), (1025, 320)])
def test_nf4_has_the_values_of_bitsandbytes(kernel: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    functional = pytest.importorskip("bitsandbytes").functional
    torch.manual_seed(0)
    values = (torch.randn(shape) * 0.3).to(dtype)
    values[0, :] = 0
    values[1, 3] = 7
    way = packing("nf4", *shape)
    packed = torch.full((way.nbytes,), 0xAB, dtype=torch.uint8)
    loss = way.pack(values.view(-1), packed, "w")
    codes, state = functional.quantize_4bit(values, blocksize=64, compress_statistics=True, quant_type="nf4")
    assert torch.equal(packed[: codes.numel()], codes.view(-1))
    expected = values_of(codes, state).view(-1)
    assert torch.equal(unpacked(way, packed, dtype).view(BIT_PATTERN[dtype]), expected.view(BIT_PATTERN[dtype]))
    assert math.isclose(loss.error, float((expected.double() - values.view(-1).double()).square().sum()), rel_tol=1e-9)


@pytest.mark.parametrize("dtype", TYPES)
def test_int8_of_files_has_the_values_of_bitsandbytes(kernel: str, dtype: torch.dtype) -> None:
    """Every code, and largest values from 0 and tiny ones on, with infinity and NaN among them."""
    functional = pytest.importorskip("bitsandbytes").functional
    torch.manual_seed(0)
    for rows, columns in ((1, 256), (9, 700), (4, 100_001)):
        way = FORMS[Int8Largest.form](rows, columns)
        packed = torch.zeros(way.nbytes, dtype=torch.uint8)
        codes, largest = way.parts(packed)
        codes.copy_(torch.randint(-128, 128, codes.shape, dtype=torch.int8))
        codes[0, :256] = torch.arange(-128, 128)
        largest.copy_(torch.randn(rows).abs() * 2.0 ** torch.randint(-140, 120, (rows,)))
        if rows > 3:
            largest[1:4] = torch.tensor([0.0, math.inf, math.nan])
        expected = functional.int8_vectorwise_dequant(codes, largest).view(-1)
        assert expected.dtype is torch.float32
        assert same_bits(unpacked(way, packed, dtype), expected.to(dtype))


def test_nf4_needs_whole_blocks_and_bitsandbytes_to_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    assert packing_where_fit("nf4", torch.Size((33, 33)), (33, 1), torch.float32) is None
    way = packing("nf4", 16, 64)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(MisuseError, match="quantize='nf4' packs with bitsandbytes: pip install bitsandbytes"):
        way.pack(torch.zeros(1024), torch.zeros(way.nbytes, dtype=torch.uint8), "w")


def test_int8_is_the_nearest_code(kernel: str) -> None:
    torch.manual_seed(0)
    values = torch.randn(64, 100)
    way = packing("int8", 64, 100)
    packed = torch.empty(way.nbytes, dtype=torch.uint8)
    way.pack(values.view(-1), packed, "w")
    scales = way.parts(packed)[1]
    assert torch.equal(scales, values.abs().amax(1) / 127)
    assert bool(((unpacked(way, packed, torch.float32).view(64, 100) - values).abs() <= 0.5001 * scales[:, None]).all())


def test_int4_is_better_than_its_largest_element_by_7(kernel: str) -> None:
    """The plainest choice of a scale, symmetric and with all of the range, loses more."""
    torch.manual_seed(0)
    values = torch.randn(64, 32 * 4)
    way = packing("int4", 64, 128)
    packed = torch.empty(way.nbytes, dtype=torch.uint8)
    loss = way.pack(values.view(-1), packed, "w")
    groups = values.view(-1, 32)
    scale = (groups.abs().amax(1, keepdim=True) / 7).bfloat16().float()
    plain = ((groups / scale).round().clamp(-8, 7) * scale - groups).double().square().sum()
    assert loss.error < 0.8 * float(plain)
    assert 0.08 < loss.relative < 0.09


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_what_cannot_be_is_refused(quantize: str) -> None:
    way = packing(quantize, 2, 64)
    packed = torch.empty(way.nbytes, dtype=torch.uint8)
    for wrong in (math.nan, math.inf, -math.inf):
        values = torch.ones(128)
        values[77] = wrong
        with pytest.raises(MisuseError, match=r"parameter 'a\.w' has infinity or NaN"):
            way.pack(values, packed, "a.w")
    largest = torch.full((128,), torch.finfo(torch.float32).max)
    with pytest.raises(MisuseError, match=r"'a\.w' has values so large that they are infinite"):  # a scale is rounded upwards
        way.pack(largest, packed, "a.w")


def test_zeros_stay_zeros(kernel: str) -> None:
    for quantize in ("int8", "int4"):
        way = packing(quantize, 3, 40)
        packed = torch.empty(way.nbytes, dtype=torch.uint8)
        loss = way.pack(torch.zeros(120), packed, "w")
        assert (loss, loss.relative) == (Loss(), 0)
        assert torch.equal(unpacked(way, packed, torch.float32), torch.zeros(120))


def test_which_parameters_are_packed() -> None:
    def rows(*shape: int, stride: tuple[int, ...] | None = None, dtype: torch.dtype = torch.float32) -> Any:
        size = torch.Size(shape)
        given_stride = torch.empty(size, device="meta").stride() if stride is None else stride
        found = packing_where_fit("int8", size, given_stride, dtype)
        return None if found is None else (found.rows, found.columns)

    assert rows(64, 48) == (64, 48)
    assert rows(48, 64, stride=(1, 48)) == (64, 48), "rows are what lies together"
    assert rows(8, 32, 64) == (256, 64), "experts"
    assert rows(64, 16, 3, 3) == (64, 144), "a convolution"
    assert rows(64, 48, dtype=torch.bfloat16) == (64, 48)
    for shape in ((4096,), (16, 32), (2048, 16), (1, 4096), (4096, 1)):
        assert rows(*shape) is None
    assert rows(64, 48, dtype=torch.float64) is None
    assert rows(64, 48, dtype=torch.int64) is None
    assert packing_where_fit(None, torch.Size((64, 48)), (48, 1), torch.float32) is None
    assert packing_of(FORM["int8"], torch.Size((5,)), (1,)) is None


# -- a model -------------------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Has a matrix that is packed, one that lies column by column, a convolution, experts, vectors, and a tiny matrix."""

    def __init__(self, words: int = 50) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, 64)
        self.norm = nn.LayerNorm(64)
        self.inner = nn.Linear(64, 96)
        self.turned = nn.Parameter(torch.randn(48, 96).t())
        self.tiny = nn.Linear(48, 4)
        self.head = nn.Linear(64, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embed(index))
        return torch.cat((self.tiny(self.inner(hidden) @ self.turned), self.head(hidden)), -1)


INDEX = torch.arange(12)[None] % 50


@pytest.fixture(params=["int8", "int4"])
def quantize(request: pytest.FixtureRequest) -> Any:
    return request.param


def paged(store: TieredStore, quantize: Any, **options: Any) -> Net:
    torch.manual_seed(0)
    return zero.page(Net(), store, policy=zero.Policy(quantize=quantize), **options)  # type: ignore[return-value]


def dequantised(model: nn.Module) -> Net:
    """The same model in memory, with the values that the paged one shows."""
    reference = Net()
    reference.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    return reference


def test_it_computes_with_the_dequantised_values(store: TieredStore, quantize: Any, tmp_path: Path) -> None:
    model = paged(store, quantize)
    reference = dequantised(model)
    torch.manual_seed(0)
    given_values = Net().state_dict()
    assert torch.equal(model(INDEX), reference(INDEX))
    for name, value in reference.state_dict().items():
        same = torch.equal(value, given_values[name])
        assert same is (value.dim() == 1 or name == "tiny.weight"), name
        assert torch.equal(model.get_parameter(name) + 0, value)
    zero.commit(model)
    zero.export(model, tmp_path / "export")
    store.close()
    exported: dict[str, torch.Tensor] = {}
    with TieredStore.open(tmp_path / "store", dram="1MiB", access="read") as again:
        other = zero.page(Net(), again, existing="resume", policy=zero.Policy(quantize=quantize))
        assert torch.equal(other(INDEX), reference(INDEX))
        with torch.inference_mode():
            assert torch.equal(other(INDEX), reference(INDEX))
        assert torch.equal(other(INDEX), reference(INDEX))
        weight = other.get_parameter("inner.weight").clone()
        assert torch.equal(other(INDEX), reference(INDEX))
        assert torch.equal(weight, reference.inner.weight)
        again.close()
    for file in (tmp_path / "export").glob("*.safetensors"):
        exported |= load_file(file)
    assert {name: value.tolist() for name, value in exported.items()} == {
        name: value.tolist() for name, value in reference.state_dict().items() if name != "head.weight"
    }


def test_an_export_at_rest_is_that_of_the_model(tmp_path: Path, quantize: Any) -> None:
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        model = paged(store, quantize)
        zero.commit(model)
        zero.export(model, tmp_path / "one")
        store.close()
    with StoreAtRest(tmp_path / "store") as rest:
        export_at_rest(rest, tmp_path / "other")
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "other"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("access", ["write", "read"])
def test_on_a_device(tmp_path: Path, quantize: Any, access: Any) -> None:
    """Host memory in place of a device's: units are unpacked in the top tier."""
    budgets = {"hbm": "1MiB", "device": "cpu", "dram": "1MiB"}
    with TieredStore.open(tmp_path / "store", **budgets) as store:
        model = paged(store, quantize)
        reference = dequantised(model)
        assert torch.equal(model(INDEX), reference(INDEX))
        zero.commit(model)
        assert not [key for key in store if key.endswith("/converted")]
        store.close()
    with TieredStore.open(tmp_path / "store", access=access, **budgets) as store:
        model = zero.page(Net(), store, existing="resume", policy=zero.Policy(quantize=quantize))  # type: ignore[assignment]
        assert torch.equal(model(INDEX), reference(INDEX))


@pytest.mark.parametrize("access", ["write", "read"])
def test_an_interruption_while_it_is_unpacked(tmp_path: Path, access: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        model = paged(store, "int8")
        reference = dequantised(model)
        zero.commit(model)
        store.close()
    with TieredStore.open(tmp_path / "store", dram="1MiB", access=access) as store:
        model = zero.page(Net(), store, existing="resume", policy=zero.Policy(quantize="int8"))  # type: ignore[assignment]
        unpack, left = Packing.unpack, [3]

        def struck(way: Packing, packed: torch.Tensor, out: torch.Tensor) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
            unpack(way, packed, out)

        monkeypatch.setattr(Packing, "unpack", struck)
        for number in (1, 2, 3):
            left[0] = number
            with pytest.raises(KeyboardInterrupt):
                model(INDEX)
            assert torch.equal(model(INDEX), reference(INDEX))
        assert not [key for key in store if key.endswith("/converted")]


class Wide(nn.Module):
    """Layers of 2 MiB each in fp32: more than the least of memory that is kept for the next unit."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 1024, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [layer(x) for layer in self.layers]


def test_memory_of_a_unit_is_used_again_unless_it_is_still_shown(tmp_path: Path) -> None:
    policy = zero.Policy(quantize="int8")
    with TieredStore.open(tmp_path / "store", dram="16MiB") as store:
        model = zero.page(Wide(), store, policy=policy)
        zero.commit(model)
        store.close()
    with TieredStore.open(tmp_path / "store", dram="2MiB", access="read") as store:
        model = zero.page(Wide(), store, existing="resume", policy=policy)
        reference = Wide()
        reference.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
        x, seen, kept = torch.randn(3, 512), [], []
        keeping = False

        def look(layer: nn.Module, args: object) -> None:
            weight: Any = layer.weight
            seen.append(weight.data_ptr())
            if keeping:
                kept.append(weight.detach())

        for layer in model.layers:  # type: ignore[union-attr]
            layer.register_forward_pre_hook(look)
        for now in (False, True, False):
            keeping = now
            made = model(x)
            assert all(torch.equal(one, other) for one, other in zip(made, reference(x), strict=True))
        assert len(set(seen[:4])) == 1
        assert len(set(seen[4:8])) == 4, "an alias still shows the memory of each"
        for one, layer in zip(kept, reference.layers, strict=True):
            assert torch.equal(one, layer.weight)  # type: ignore[arg-type]


def test_rows_of_a_large_embedding_are_slices(store: TieredStore, quantize: Any) -> None:
    torch.manual_seed(0)
    model = zero.page(Net(2000), store, policy=zero.Policy(quantize=quantize))
    assert any("[2]" in key for key in store)
    reference = Net(2000)
    reference.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    index = torch.arange(0, 2000, 7)[None]
    assert torch.equal(model(index), reference(index))
    with pytest.raises(MisuseError, match="for reading only"):
        model.embed.weight.data.zero_()  # type: ignore[union-attr]
    with pytest.raises(MisuseError, match="for reading only"):
        model.embed.weight.requires_grad_()  # type: ignore[union-attr]
    assert torch.equal(model(index), reference(index))


@pytest.mark.parametrize("storage", [None, torch.bfloat16])
def test_bytes_at_rest(store: TieredStore, quantize: Any, storage: torch.dtype | None) -> None:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)))
    zero.page(model, store, policy=zero.Policy(storage=storage, quantize=quantize))
    stored = sum(store.spec(key).nbytes for key in store if "/param/" in key)
    full = sum(parameter.numel() * 4 for parameter in model.parameters())
    assert {"int8": 3.85, "int4": 6.7}[quantize] < full / stored < {"int8": 4.0, "int4": 7.12}[quantize]


def refusals(model: Net) -> Iterator[Any]:
    def written_within_forward() -> None:
        with zero.gathered(model.inner), torch.no_grad():
            model.inner.weight.zero_()

    yield lambda: zero.AdamW(model.parameters())
    yield lambda: model.inner.weight.requires_grad_()
    yield lambda: model.requires_grad_(True)
    yield lambda: setattr(model.norm.weight, "requires_grad", True)
    yield lambda: model.inner.weight.data.zero_()
    yield lambda: model.norm.weight.data.mul_(2)
    yield lambda: model.inner.weight.detach().zero_()
    yield lambda: nn.init.normal_(model.inner.weight)
    yield lambda: model.load_state_dict(model.state_dict())
    yield lambda: zero.gathered(model, write=True).__enter__()
    yield written_within_forward


def test_it_is_for_reading_only(store: TieredStore, quantize: Any) -> None:
    model = paged(store, quantize)
    before = model.state_dict()
    reference = dequantised(model)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    model.requires_grad_(False)
    for call in refusals(model):
        with pytest.raises(MisuseError, match=r"a quantised model, which is for reading only.*the model without quantize"):
            call()
        assert torch.equal(model(INDEX), reference(INDEX))
    hidden = torch.randn(1, 64, requires_grad=True)
    model.inner(hidden).sum().backward()  # gradients of inputs flow through it
    expected = hidden.detach().requires_grad_()
    reference.inner(expected).sum().backward()
    assert hidden.grad is not None
    assert torch.equal(hidden.grad, expected.grad)  # type: ignore[arg-type]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_hook_that_unfreezes_within_forward_is_refused(store: TieredStore) -> None:
    model = paged(store, "int8")
    handle = model.norm.register_forward_pre_hook(lambda module, args: setattr(module.weight, "requires_grad", True))
    try:
        with pytest.raises(MisuseError, match="for reading only"):
            model(INDEX)
    finally:
        handle.remove()


def test_infinite_weights_leave_nothing(store: TieredStore, quantize: Any) -> None:
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        model.turned[5, 6] = math.inf
    with pytest.raises(MisuseError, match="parameter 'turned' has infinity or NaN"):
        zero.page(model, store, policy=zero.Policy(quantize=quantize))
    assert not list(store)
    del before["turned"]
    assert all(torch.allclose(model.state_dict()[name], value, atol=0.5) for name, value in before.items())


def test_another_policy_or_another_form_is_not_taken_for_this_one(store: TieredStore, quantize: Any) -> None:
    model = paged(store, quantize)
    zero.commit(model)
    with pytest.raises(MisuseError, match="is not what was committed as 'model'"):
        zero.page(Net(), store, existing="resume", policy=zero.Policy(quantize="int4" if quantize == "int8" else "int8"))
    as_committed = zero.page(Net(), store, existing="resume")  # the commit says in which form
    assert torch.equal(as_committed(INDEX), model(INDEX))
    record = read_record(store, "model")
    units = record["layout"]["units"]
    packed = [one for _, described in units for one in described if one[3] in FORMS]
    assert packed
    for other, complaint in (("int3 by row", "is of type 'int3 by row', which this release does not know"),):
        packed[0][3] = other
        write_record(store, "model", record)
        with pytest.raises(ManifestError, match=complaint):
            zero.page(Net(), store, existing="resume", policy=zero.Policy(quantize=quantize))
    vector = next(one for _, described in units for one in described if len(one[1]) == 1)
    packed[0][3], vector[3] = FORM[quantize], FORM[quantize]
    write_record(store, "model", record)
    with pytest.raises(ManifestError, match=r"is stored as .* which is for matrices of floats"):
        zero.page(Net(), store, existing="resume", policy=zero.Policy(quantize=quantize))


def test_it_cannot_be_divided_anew(tmp_path: Path, quantize: Any) -> None:
    with TieredStore.open(tmp_path / "one", dram="1MiB") as store:
        zero.commit(paged(store, quantize))
        store.close()
    with (
        TieredStore.open(tmp_path / "other", dram="1MiB") as store,
        pytest.raises(MisuseError, match=r"'model' in .* is quantised, which only the store that it is in"),
    ):
        zero.page(Net(), store, existing="resume", source=tmp_path / "one")


def test_what_there_is_to_choose() -> None:
    with pytest.raises(MisuseError, match="quantize is 'int8', 'int4', 'nf4' or None, not 'int2'"):
        zero.Policy(quantize="int2")  # type: ignore[arg-type]
