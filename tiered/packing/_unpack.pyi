"""What cffi makes of libaio_ext/unpack.cdef.h."""

class _Library:
    UNPACK_FLOAT32: int
    UNPACK_BFLOAT16: int
    def unpack_int8(self, codes: int, scales: int, rows: int, columns: int, out: int, type: int, /) -> int: ...
    def unpack_int4(self, codes: int, scales: int, rows: int, columns: int, out: int, type: int, /) -> int: ...

lib: _Library
