"""What cffi makes of libaio_ext/unpack.cdef.h and moments.cdef.h."""

class _Library:
    UNPACK_FLOAT32: int
    UNPACK_BFLOAT16: int
    def unpack_int8(self, codes: int, scales: int, rows: int, columns: int, out: int, type: int, /) -> int: ...
    def unpack_int4(self, codes: int, scales: int, rows: int, columns: int, out: int, type: int, /) -> int: ...
    def moments_encode8(
        self, values: int, count: int, codes: int, codes_stride: int, scales: int, scales_stride: int, starts: int,
        bounds: int, /,
    ) -> None: ...
    def moments_encode4(
        self, values: int, count: int, codes: int, codes_stride: int, scales: int, scales_stride: int, starts: int,
        bounds: int, /,
    ) -> None: ...
    def moments_decode8(
        self, codes: int, codes_stride: int, scales: int, scales_stride: int, count: int, out: int, map: int, /
    ) -> None: ...
    def moments_decode4(
        self, codes: int, codes_stride: int, scales: int, scales_stride: int, count: int, out: int, map: int, /
    ) -> None: ...
    def moments_round(self, values: int, count: int, out: int, key: int, first: int, /) -> None: ...

lib: _Library
