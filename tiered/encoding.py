"""What a manifest says of each tensor, made as it arrives on the disk and kept beside it."""

from __future__ import annotations

from tiered import manifest as manifests
from tiered.errors import ManifestError, MisuseError
from tiered.residency import Entry, State
from tiered.tiers.nvme import NvmeTier

__all__ = ["Encoding"]


class Encoding:
    """Fills ``record`` of copies at the bottom; a copy there never changes. All calls are made under the engine's lock."""

    def __init__(self, nvme: NvmeTier) -> None:
        self._nvme = nvme

    def arrived(self, entry: Entry) -> None:
        """Encode it now. What cannot be is nobody's error yet: it may be gone before a commit comes to it."""
        try:
            self.of(entry)
        except (ManifestError, MisuseError):
            return

    def of(self, entry: Entry) -> bytes:
        """Raises MisuseError for a key, ManifestError for a shape or an element type that cannot be written down."""
        copy, spec, extent = entry.copies[-1], entry.spec, None
        assert copy is not None
        assert copy.state is State.CLEAN
        if not copy.record:
            if not entry.empty:
                extent = manifests.Extent(*self._nvme.extent(copy.slot), copy.slot.nbytes)
            checksums = copy.checksums if extent else b""
            copy.record = manifests.encode_tensor(
                manifests.TensorRecord(
                    entry.name, entry.tensor_id, spec.dtype, spec.shape, spec.itemsize, copy.generation, extent, checksums
                )
            )
        return copy.record
