"""``TieredCache``: the keys and values of a context in a store, so that it may be longer than memory, and is kept by name.

All layers change together. What the cache has is one ``Turn``, a value: ids, mask, and each layer's extent. A forward makes the
next one, which is in force when the forward has ended; so does a crop, or a beam search's reordering. One assignment puts it in
force: an exception at any line leaves the turn before, or this one.

The record in the store describes the turn of the last ``commit``. Its blocks are neither changed nor deleted before the next
one, so that any commit of the store, whoever makes it, keeps a cache that is whole.
"""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from transformers.cache_utils import DummyLayer

from tiered.errors import ManifestError, MisuseError, StoreClosed, expect_type, one_of, quoted, whole_number
from tiered.integrations.kept import CACHE_RECORD, OF_CACHE, forget_cache, kept_caches, refuse_no_cache
from tiered.integrations.transformers.kv_layer import CachedTokens, CopyMemory, PagedLayer
from tiered.integrations.transformers.kv_model import ARGUMENT, NO_STATE, WatchingCache, unwatch, watch, windows
from tiered.integrations.transformers.kv_record import VERSION, CacheRecord, LayerRecord, Model, read, tensor_of
from tiered.store import TieredStore, Touch
from tiered.types import Access, Owner, Use
from tiered.zero.paging.pager import pager_of

__all__ = ["TieredCache"]

STAMPS = 1 << 62


@dataclass(frozen=True)
class Turn:
    """What a cache has: ids, int64 of shape (batch, tokens); which of them are no padding, bool (None: all); extents."""

    ids: torch.Tensor
    mask: torch.Tensor | None
    extents: tuple[CachedTokens, ...]

    @property
    def length(self) -> int:
        return self.ids.shape[1]

    @property
    def batch(self) -> int:
        return self.ids.shape[0]


class TieredCache(WatchingCache):
    """A cache for ``model.generate(..., cache=cache)`` whose keys and values are in ``store``.

    Each layer has blocks of ``block`` tokens, which come to memory and leave it as other tensors of the store do. While a layer
    computes, a copy of its keys and values is in memory beside the store's budget. ``store`` is open for writing; it may have
    the model's parameters, too. A store that has not follows the order of the blocks: do not have it follow another one. Before
    transformers 5.24 the argument's name is ``past_key_values``.

    ``name``: of the cache in the store. ``existing``: "refuse" a name that is kept already, or "overwrite" it;
    ``TieredCache.open`` goes on with it. ``commit`` keeps the cache, and everything else in the store. ``note``: a text of
    your own, which ``commit`` keeps with it.

    The tokens are those of ``DynamicCache``: greedy, drawn, beams, assisted decoding, batches with padding. A forward of ids
    that do not follow those that the cache has raises MisuseError; ``reuse(ids)`` crops it to what both share.

    Raises MisuseError for a model that has other states than keys and values of tokens (linear attention), that is an encoder
    and a decoder or sees more than text, and for a store that cannot be written; TransferError and CapacityError of the store.
    """

    def __init__(
        self, model: Any, store: TieredStore, *, name: str = "chat", block: int = 256, existing: str = "refuse"
    ) -> None:
        self._begin(model, store, name, block, existing, None)

    def _begin(
        self, model: Any, store: TieredStore, name: str, block: int, existing: str, made_by: Model | None
    ) -> None:
        """Be a cache without tokens. ``made_by``: the model as its keys and values are to be of; None: as it is now."""
        one_of("existing", existing, ("refuse", "overwrite"))
        self._prepare(model, store, name, block)
        if existing == "refuse" and name + CACHE_RECORD in store:
            raise MisuseError(
                f"{store} keeps a cache named {name!r} already: TieredCache.open goes on with it; or give another name=, or "
                "existing='overwrite'"
            )
        self._made_by = Model.noted(model) if made_by is None else made_by
        self._collect(())
        self._stamp()
        self._register(model)

    @classmethod
    def open(cls, model: Any, store: TieredStore, *, name: str = "chat") -> TieredCache:
        """Return the cache ``name`` as of its last ``commit``.

        What came after that commit is not there. Raises MisuseError where no such cache is kept or it is another model's,
        ManifestError where it is damaged.
        """
        cache = cls.__new__(cls)
        expect_type(store, TieredStore, "caches are kept in a TieredStore")
        refuse_no_cache(store, name)
        record = read(store, name + CACHE_RECORD)
        cache._prepare(model, store, name, record.block)
        cache._made_by = record.model.opened(model, f"the cache {name!r} in {store}")
        batch, length = len(record.ids), len(record.ids[0]) if record.ids else 0
        try:
            if len(record.layers) != len(cache._layers):
                raise ValueError(f"it has {len(record.layers)} layers, and the model {len(cache._layers)}")
            found = zip(record.layers, cache._layers, strict=True)
            extents = tuple(layer.restore(paged, length, batch, store) for layer, paged in found)
            ids = torch.tensor(record.ids, dtype=torch.long, device="cpu").reshape(batch, length)
        except (ValueError, RuntimeError) as error:
            raise ManifestError(f"the cache {name!r} in {store} is damaged: {error}") from error
        mask = None if record.mask is None else torch.tensor(record.mask, dtype=torch.bool, device="cpu").reshape(batch, length)
        cache._turn = Turn(ids, mask, extents)
        cache._rest = torch.tensor(record.rest, dtype=torch.long, device="cpu") if record.rest else None
        cache.note = record.note
        cache._settle()
        cache._fix()
        cache._collect(cache._referenced())
        cache._stamp()
        cache._register(model)
        return cache

    @staticmethod
    def kept(store: TieredStore) -> list[str]:
        """Return the names of the caches that ``open`` finds in ``store``."""
        expect_type(store, TieredStore, "caches are kept in a TieredStore")
        return kept_caches(store)

    @staticmethod
    def forget(store: TieredStore, name: str) -> None:
        """Delete the kept cache ``name``: its tensors are gone from ``store``, and with ``store.commit()`` for good.

        Raises MisuseError where no such cache is kept, or it is open, and for a store that is open for reading.
        """
        expect_type(store, TieredStore, "caches are kept in a TieredStore")
        if name in store.attached.made(_Open, _Open):
            raise MisuseError(f"the cache {name!r} in {store} is open: close() it first")
        forget_cache(store, name)

    def _prepare(self, model: Any, store: TieredStore, name: str, block: int) -> None:
        """Check what was given, and make the layers."""
        expect_type(store, TieredStore, "TieredCache(model, store): the store is a TieredStore")
        expect_type(model, nn.Module, "TieredCache(model, store): the model is one of transformers")
        if not isinstance(name, str) or not name:
            raise MisuseError(f"the name of a cache is a text, not {name!r}")
        whole_number("block is a number of tokens", block)
        if store.access is Access.READ:
            raise MisuseError(
                f"{store} is open for reading, and a cache is written: open it without access='read', or give TieredCache a "
                "store of its own"
            )
        if name in store.attached.made(_Open, _Open):
            raise MisuseError(f"the cache {name!r} in {store} is open already: close() it first, or give another name=")
        self._owner = Owner("cache", name)
        store.claim(self._owner)
        self._store, self._name, self._block = store, name, block
        self._model: Callable[[], Any] = weakref.ref(model)
        self._layers: list[PagedLayer] = []
        layers: list[Any] = []
        copies = CopyMemory()
        for window in windows(model):
            if window == NO_STATE:
                layers.append(DummyLayer())
                continue
            layer = PagedLayer(store, self._owner, f"{name}{OF_CACHE}{len(layers)}", block, window, copies)
            layers.append(layer)
            self._layers.append(layer)
        super().__init__(layers=layers)
        nothing = tuple(CachedTokens() for _ in self._layers)
        self._turn = Turn(torch.zeros((0, 0), dtype=torch.long, device="cpu"), None, nothing)
        self._pending: tuple[torch.Tensor, torch.Tensor | None] | None = None
        self._rest: torch.Tensor | None = None
        self.note = ""
        self._assisted = False
        self._stamps: tuple[int, ...] = ()
        self._followed: object = None
        self._follows = not _paged_into(model, store)

    def _register(self, model: Any) -> None:
        """Take the name, and have the model tell of its forwards."""
        self._store.attached.made(_Open, _Open)[self._name] = self
        watch(model, self)

    # -- what it has -----------------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The name in the store."""
        return self._name

    @property
    def ids(self) -> torch.Tensor:
        """The tokens whose keys and values the cache has: int64 of shape (batch, tokens), on the CPU."""
        return self._turn.ids.clone()

    @property
    def tokens(self) -> torch.Tensor:
        """``ids``, and after them those that ``commit`` was given besides, as long as no forward came after it."""
        turn, rest = self._turn, self._rest
        return turn.ids.clone() if rest is None else torch.cat([turn.ids.reshape(len(rest), turn.length), rest], dim=1)

    def __repr__(self) -> str:
        turn = self._turn
        return f"TieredCache({self._name!r}, {turn.length} tokens of {turn.batch} sequences in {self._store})"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse copy and pickle."""
        raise MisuseError(f"the cache {self._name!r} is in a store, and is not copied so: fork(name) makes another one in it")

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens, of all forwards that have ended."""
        return self._turn.length

    def matches(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> int:
        """Return how many tokens at the beginning of ``input_ids``, of shape (batch, tokens), the cache has, in all sequences.

        Raises MisuseError for another number of sequences.
        """
        ids, mask = _ids_of(input_ids), _mask_of(attention_mask)
        turn = self._turn
        if not turn.length:
            return 0
        self._refuse_batch(ids.shape[0])
        most = min(turn.length, ids.shape[1])
        same = turn.ids[:, :most] == ids[:, :most]
        if mask is not None or turn.mask is not None:
            same &= _filled(turn.mask, turn.ids)[:, :most] == _filled(mask, ids)[:, :most]
        return int(same.all(dim=0).long().cumprod(0).sum())

    def reuse(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> int:
        """Crop the cache to what it shares with the beginning of ``input_ids``, and return that number of tokens.

        ``generate(input_ids, attention_mask=..., cache=cache)`` then computes only the rest, at least the last token.
        Raises MisuseError for another number of sequences.
        """
        length = min(self.matches(input_ids, attention_mask), input_ids.shape[1] - 1)
        if length < self._turn.length:
            self.crop(length - self._turn.length)
        return length

    def fork(self, name: str, *, existing: str = "refuse") -> TieredCache:
        """Return another cache with the same tokens, named ``name``, in the same store. The blocks are copied."""
        self._settle()
        self._refuse_rolled_back()
        other = TieredCache.__new__(TieredCache)
        other._begin(self._its_model(), self._store, name, self._block, existing, self._made_by)
        for mine, theirs in zip(self._layers, other._layers, strict=True):
            for block in mine.extent.blocks:
                with self._store.lease(mine.key(block)) as flat:
                    self._store.put(theirs.key(block), flat, owner=other._owner)
            theirs.geometry, theirs.is_initialized = mine.geometry, mine.is_initialized
            theirs.next_serial = mine.next_serial
        other._turn, other.note = self._turn, self.note
        other._settle()
        return other

    # -- keeping it ------------------------------------------------------------------------------------------------------------

    def commit(self, input_ids: torch.Tensor | None = None) -> int:
        """Keep the cache under its name: write its record, and ``store.commit()``. Return the generation.

        ``input_ids``: all tokens so far, of shape (batch, tokens), as ``generate`` returns them. The last one is not computed
        yet, so ``ids`` lacks it; ``tokens`` has it, also after ``open``.

        Raises what ``store.commit`` raises, and MisuseError for ``input_ids`` that do not begin with those of the cache, and
        where the model's weights are not those that the cache began with.
        """
        self._settle()
        if input_ids is not None:
            given = _ids_of(input_ids)
            if self._turn.length and not torch.equal(given[:, : self._turn.length], self._turn.ids):
                raise MisuseError(
                    f"commit(input_ids) takes all tokens, and the cache {self._name!r} has {self._turn.length} others: give "
                    "what generate() returned"
                )
            self._rest = given[:, self._turn.length :]
        self._refuse_rolled_back()
        self._made_by = self._made_by.kept(self._its_model(), self._name)
        turn = self._turn
        record = CacheRecord(
            VERSION,
            self._made_by,
            self._block,
            turn.ids.tolist(),
            None if turn.mask is None else turn.mask.long().tolist(),
            [] if self._rest is None else self._rest.tolist(),
            [LayerRecord.of(*one) for one in zip(self._layers, turn.extents, strict=True)],
            self.note,
        )
        self._stamp()
        self._store.put(self._name + CACHE_RECORD, tensor_of(record), owner=self._owner)
        self._fix()
        self._collect(self._referenced())
        return self._store.commit()

    def close(self) -> None:
        """Let the name and the model go. What was not committed stays in the store until the next cache of that name."""
        named = self._store.attached.made(_Open, _Open)
        if named.get(self._name) is self:
            del named[self._name]
        model = self._model()
        if model is not None:
            unwatch(model, self)
        self._model = _no_model
        if named.followed == id(self):
            named.followed = 0
            with suppress(StoreClosed):
                self._store.follow([])

    # -- changes of all layers -------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget all tokens. What the last ``commit`` kept stays until the next one."""
        turn = self._turn
        self._become(Turn(turn.ids[:0, :0], None, tuple(CachedTokens() for _ in turn.extents)))

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens. Raises MisuseError for a positive number."""
        turn = self._turn
        if type(tokens_to_remove) is not int:
            raise MisuseError(f"crop takes a negative number, of tokens to remove from the end, not {quoted(tokens_to_remove)}")
        if tokens_to_remove > 0:
            raise MisuseError(f"crop({tokens_to_remove}): give a negative number, of tokens to remove from the end")
        length = max(turn.length + tokens_to_remove, 0)
        if length == turn.length:
            self._settle()
        elif not length:
            self.reset()
        else:
            mask = None if turn.mask is None else _reduced(turn.mask[:, :length])
            extents = tuple(extent.cropped(length, self._block) for extent in turn.extents)
            self._become(Turn(turn.ids[:, :length].clone(), mask, extents))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Have sequence i be what sequence ``beam_idx[i]`` was. Moves no byte. Raises MisuseError for what is no sequence."""
        self._select(self._sequences(beam_idx, "reorder_cache"))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Have ``repeats`` of each sequence, one after the other. Moves no byte. Raises MisuseError for a number below 1."""
        whole_number("batch_repeat_interleave takes how many there are to be of each", repeats)
        self._select([row for row in range(self._turn.batch) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences ``indices`` only. Moves no byte. Raises MisuseError for what is no sequence."""
        self._select(self._sequences(indices, "batch_select_indices"))

    def _sequences(self, indices: Any, call: str) -> list[int]:
        """Return the numbers of the sequences that ``indices`` choose: numbers, or one true or false for each."""
        rows = torch.arange(self._turn.batch, dtype=torch.int64, device="cpu")
        try:
            chosen = torch.as_tensor(indices, device="cpu")
            if chosen.dim() == 1 and not (chosen.is_floating_point() or chosen.is_complex()):
                return rows[chosen].tolist()
        except (TypeError, ValueError, RuntimeError, IndexError):
            pass
        raise MisuseError(f"{call} takes numbers of sequences, of which there are {len(rows)}, not {indices!r:.100}")

    def _select(self, rows: Sequence[int]) -> None:
        turn = self._turn
        if turn.length:
            mask = None if turn.mask is None else _reduced(turn.mask[rows])
            self._become(Turn(turn.ids[rows], mask, tuple(extent.selected(rows) for extent in turn.extents)))

    def _become(self, turn: Turn) -> None:
        self._rest = None
        before, self._turn = self._turn, turn
        self._settle()
        for layer, old, new in zip(self._layers, before.extents, turn.extents, strict=True):
            if old.blocks is new.blocks:
                continue
            stay = {block.serial for block in new.blocks}
            for block in old.blocks:
                if block.serial not in stay and block.serial not in layer.fixed and layer.key(block) in self._store:
                    self._store.delete(layer.key(block), owner=self._owner)

    def _settle(self) -> None:
        """Have the layers be as the turn says: a forward that did not end is forgotten."""
        self._pending = None
        for layer, extent in zip(self._layers, self._turn.extents, strict=True):
            layer.extent = extent

    def _fix(self) -> None:
        """Note what the record in the store refers to."""
        for layer, extent in zip(self._layers, self._turn.extents, strict=True):
            counts = [min(self._block, extent.length - at * self._block) for at in range(len(extent.blocks))]
            layer.fixed = {block.serial: count for block, count in zip(extent.blocks, counts, strict=True)}

    def _referenced(self) -> set[str]:
        """Return the names of all tensors that the turn refers to, and what is the cache's besides."""
        blocks = {layer.key(block) for layer in self._layers for block in layer.extent.blocks}
        return blocks | {self._name + CACHE_RECORD, _stamp_key(self._name)}

    def _collect(self, referenced: Collection[str]) -> None:
        """Delete the other tensors of this cache, and have later blocks have numbers of their own."""
        for key in self._store.owned(self._owner):
            if key not in referenced:
                self._store.delete(key, owner=self._owner)
        for layer in self._layers:
            layer.next_serial = max([layer.next_serial, *(block.serial + 1 for block in layer.extent.blocks)])

    # -- forwards --------------------------------------------------------------------------------------------------------------

    def begin(self, model: Any, given: Mapping[str, Any]) -> None:
        """Note the arguments of a forward of ``model`` that begins. Raises MisuseError where it cannot go on from the cache."""
        if self._its_model() is not model:
            raise MisuseError(
                f"the cache {self._name!r} was made with another model, whose keys and values it has: "
                "TieredCache(model, store, name=...) makes one for this model"
            )
        if given.get("input_ids") is None:
            raise MisuseError("a TieredCache knows its tokens by their ids: give the model input_ids, not inputs_embeds")
        self._settle()
        self._refuse_rolled_back()
        ids, mask = _ids_of(given["input_ids"]), _mask_of(given.get("attention_mask"))
        turn = self._turn
        if turn.length:
            self._refuse_batch(ids.shape[0])
        if mask is not None and mask.shape != (ids.shape[0], turn.length + ids.shape[1]):
            raise MisuseError(
                f"the cache {self._name!r} has {turn.length} tokens, and these are {ids.shape[1]} new ones of {ids.shape[0]} "
                f"sequences, but the attention_mask is of shape {list(mask.shape)}: give one of all tokens, and call "
                "cache.reuse(input_ids) before generate()"
            )
        before = None if mask is None else mask[:, : turn.length]
        if turn.length and not torch.equal(_filled(turn.mask, turn.ids), _filled(before, turn.ids)):
            raise MisuseError(
                f"the attention_mask differs from the one that the {turn.length} tokens of the cache {self._name!r} were "
                "computed with: give the same one, with ones for new tokens, or call cache.reuse(input_ids, attention_mask)"
            )
        self._stamp()
        self._follow()
        self._pending = ids, mask

    def end(self, output: Any) -> None:
        """Note that the forward has ended; ``output`` is None where an exception ended it, and then the turn stays."""
        pending, turn = self._pending, self._turn
        if pending is None or output is None:
            self._settle()
            return
        ids, mask = pending
        extents = tuple(layer.extent for layer in self._layers)
        length = turn.length + ids.shape[1]
        if any(extent.length != length for extent in extents):
            self._settle()
            raise MisuseError(
                f"this forward did not compute all {len(extents)} layers, and a TieredCache has the same tokens in all: the "
                "cache is as it was before"
            )
        self._become(Turn(torch.cat([turn.ids.reshape(ids.shape[0], turn.length), ids], dim=1), _reduced(mask), extents))

    def activate_past_recording(self) -> None:
        """Note that assisted decoding begins, which gives all ids to its first forward, as if the cache were empty."""
        self._assisted = True

    def new_of(self, input_ids: Any, new: int | None) -> int | None:
        turn, assisted = self._turn, self._assisted
        self._assisted = False
        if not turn.length or not isinstance(input_ids, torch.Tensor):
            return new
        if new is None and assisted:
            new = input_ids.shape[1] - turn.length
        if new is None:
            return None
        ids = _ids_of(input_ids)
        self._refuse_batch(ids.shape[0])
        if new < 1 or ids.shape[1] - new != turn.length or not torch.equal(ids[:, : turn.length], turn.ids):
            raise MisuseError(
                f"input_ids are {ids.shape[1]} tokens, of which the first {self.matches(ids)} are those of the cache "
                f"{self._name!r}, which has {turn.length}: call cache.reuse(input_ids) before generate(), or cache.reset()"
            )
        return new

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values, of shape (batch, heads, tokens, size), to a layer; return all that the tokens attend to.

        Raises MisuseError outside of a forward of the cache's model, with gradients, and for keys of another model; and the
        store's errors.
        """
        self._refuse_update(key_states, value_states)
        keys, values = self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)
        return keys, values

    def _refuse_update(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        if self._pending is None:
            raise MisuseError(
                f"the cache {self._name!r} takes keys and values from forwards of the model that it was made with, and none "
                f"has begun: give it as {ARGUMENT} to that model itself"
            )
        if key_states.requires_grad or value_states.requires_grad:
            raise MisuseError("a TieredCache keeps no gradients: generate, or call the model under torch.no_grad()")
        if key_states.shape[0] != self._pending[0].shape[0]:
            raise MisuseError(
                f"keys of {key_states.shape[0]} sequences, and ids of {self._pending[0].shape[0]}: a TieredCache needs the ids "
                "of each sequence"
            )

    def _refuse_batch(self, batch: int) -> None:
        if batch != self._turn.batch:
            raise MisuseError(
                f"the cache {self._name!r} has {self._turn.batch} sequences, and these are {batch}: "
                "cache.batch_select_indices or batch_repeat_interleave makes it so many, cache.reset() forgets them"
            )

    def _its_model(self) -> Any:
        model = self._model()
        if model is None:
            raise MisuseError(f"the cache {self._name!r} is closed, or its model is gone: TieredCache.open opens what was kept")
        return model

    # -- the store -------------------------------------------------------------------------------------------------------------

    def _stamp(self) -> None:
        """Write a number that the store has not had before, so that a rollback of the store is noticed."""
        number = (self._stamps[-1] + 1) % STAMPS if self._stamps else secrets.randbelow(STAMPS)
        self._stamps = (*self._stamps[-1:], number)  # an interrupted call leaves the one or the other
        self._store.put(_stamp_key(self._name), torch.tensor([number], dtype=torch.int64, device="cpu"), owner=self._owner)

    def _refuse_rolled_back(self) -> None:
        key = _stamp_key(self._name)
        if key not in self._store or int(self._store.get(key)[0]) not in self._stamps:
            raise MisuseError(
                f"{self._store} was rolled back, or the tensors of the cache {self._name!r} were changed: close() it, and "
                "TieredCache.open it again"
            )

    def _follow(self) -> None:
        """Have the store follow the order of the blocks, unless it follows the model's."""
        if not self._follows:
            return
        order, seen = [], []
        for layer in self._layers:
            extent = layer.extent
            _, blocks = layer.visible(extent)
            grows = extent.length % self._block > 0
            seen.append((grows, tuple(block.serial for block in (blocks[:-1] if grows else blocks))))
            order.append((layer, blocks, grows))
        opened = self._store.attached.made(_Open, _Open)
        if self._followed == seen and opened.followed == id(self):
            return
        touches = [
            Touch(layer.key(block), None, Use.WRITE if grows and block is blocks[-1] else Use.READ, layer.spec(block).nbytes)
            for layer, blocks, grows in order
            for block in blocks
        ]
        self._store.follow(touches)
        self._followed, opened.followed = seen, id(self)


def _paged_into(model: Any, store: TieredStore) -> bool:
    try:
        return pager_of(model).store is store
    except MisuseError:
        return False


def _ids_of(given: Any) -> torch.Tensor:
    if not isinstance(given, torch.Tensor) or given.dim() != 2 or given.is_floating_point() or given.is_meta:
        raise MisuseError("input_ids is a tensor of ids of shape (batch, tokens)")
    return given.detach().to("cpu", torch.long)


def _mask_of(given: Any) -> torch.Tensor | None:
    if given is None:
        return None
    if not isinstance(given, torch.Tensor) or given.dim() != 2:
        raise MisuseError("with a TieredCache the attention_mask is a tensor of shape (batch, all tokens), or None")
    return given.detach().to("cpu", torch.bool)


def _filled(mask: torch.Tensor | None, ids: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(ids, dtype=torch.bool) if mask is None else mask


def _reduced(mask: torch.Tensor | None) -> torch.Tensor | None:
    return None if mask is None or bool(mask.all()) else mask.clone()


def _no_model() -> None:
    """Stand for a weak reference to nothing."""


def _stamp_key(name: str) -> str:
    return f"{name}{OF_CACHE}stamp"


class _Open(weakref.WeakValueDictionary[str, TieredCache]):
    """The open caches of a store, by name."""

    followed = 0
    """The identity of the cache whose order the store follows; 0 where it follows none."""
