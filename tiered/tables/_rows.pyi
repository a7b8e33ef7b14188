"""What cffi makes of libaio_ext/rows.cdef.h."""

class _Library:
    def rows_copy(self, targets: int, sources: int, sizes: int, count: int, /) -> None: ...
    def rows_copy_equal(self, targets: int, sources: int, nbytes: int, count: int, /) -> None: ...

lib: _Library
