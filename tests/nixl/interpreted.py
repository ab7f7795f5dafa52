"""The copy kernel on a CPU, by Triton's interpreter, and workers in real memory for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction

from kvplan import Region, TransferPlan, Worker
from kvplan.describe.worker import label_of
from kvplan.staging.copy_plan import BoundCopy, CopyPlan, copy_of_spec
from kvplan.verification import FakeMemory
from kvplan_nixl.kernel import KernelCopies, copy_runs

LINE = 64


class WildAccessError(Exception):
    """A kernel that reads or writes outside the memory of a copy, or words that are not aligned."""


class CheckedCopies(KernelCopies):
    """Copies by Triton's interpreter, of which every access is looked at before it happens.

    A faulty kernel would end the process, or change memory of others.
    """

    def __init__(self, programs: int = 1, tile_bytes: int = 8192, kernel: Callable[..., None] = copy_runs) -> None:
        self._interpreted = InterpretedFunction(kernel)
        self._own: list[tuple[int, int]] = []
        self._spans = np.zeros((0, 2), np.int64)
        self._constants: dict[str, Any] = {}
        self.regions: list[tuple[int, int]] = []
        super().__init__("cpu", programs=programs, tile_bytes=tile_bytes, kernel=self)

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return partial(self._run, grid)

    def _run(self, grid: tuple[int], *arguments: Any, **constants: Any) -> None:
        self._constants = constants
        self._spans = np.array([*self.regions, *self._own], np.int64)
        builder = interpreter.interpreter_builder
        load, store = builder.create_masked_load, builder.create_masked_store

        def checked_load(pointers: Any, mask: Any, *others: Any) -> Any:
            self._check(pointers, mask)
            return load(pointers, mask, *others)

        def checked_store(pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
            self._check(pointers, mask)
            return store(pointers, value, mask, *others)

        builder.create_masked_load, builder.create_masked_store = checked_load, checked_store
        try:
            self._interpreted[grid](*arguments, **constants)
        except interpreter.InterpreterError as error:
            raise WildAccessError(str(error)) from None
        finally:
            del builder.create_masked_load, builder.create_masked_store

    def _check(self, pointers: Any, mask: Any) -> None:
        """Raise for addresses outside of the regions and the arrays of the kernel."""
        address = np.atleast_1d(pointers.data).astype(np.int64)
        used = np.broadcast_to(np.atleast_1d(mask.data).astype(bool), address.shape)
        if address.ndim == 2:
            per_word = self._constants["PER_WORD"]
            word = per_word * pointers.dtype.element_ty.primitive_bitwidth // 8
            if (address[:, ::per_word][used[:, ::per_word]] % word).any():
                raise WildAccessError(f"a word of {word} bytes that is not aligned")
        address = address[used]
        size = pointers.dtype.element_ty.primitive_bitwidth // 8
        inside = np.zeros(address.size, bool)
        for start, stop in self._spans:
            inside |= (start <= address) & (address + size <= stop)
        if not inside.all():
            raise WildAccessError("an access outside memory")

    def _on_device(self, array: Any) -> Any:
        tensor = super()._on_device(array)
        start = tensor.data_ptr()
        self._own.append((start, start + tensor.nbytes))
        return tensor


class RealMemory:
    """The regions of workers in memory of this process.

    A region begins at an address that is equal to its own modulo :data:`LINE`, so that words are as
    wide as they would be there. The bytes around a region are watched as well.
    """

    def __init__(self, workers: Iterable[Worker], memory: FakeMemory) -> None:
        self._arrays: dict[tuple[Any, str], npt.NDArray[np.uint8]] = {}
        self._regions: dict[Any, tuple[Region, ...]] = {}
        self._memory = memory
        self.workers = tuple(workers)
        for worker in self.workers:
            regions = []
            for region in worker.regions:
                array = np.zeros(region.size_bytes + 3 * LINE, np.uint8)
                start = LINE + (region.address - array.ctypes.data) % LINE
                self._arrays[worker.key, region.name] = array
                name = f"{worker.label} {region.name}"
                regions.append(Region(name, array.ctypes.data + start, region.size_bytes))
                content = memory.read(worker.key, region.address, region.size_bytes, region.device_id)
                array[start : start + region.size_bytes] = content
            self._regions[worker.key] = tuple(regions)

    def plan(self, plan: TransferPlan) -> TransferPlan:
        """Return the same plan between the regions here."""
        pairs = []
        for pair in plan.pairs:
            if pair.group_pairs:
                local = pair.local_table.in_regions(self._regions[plan.local.key])
                remote = pair.remote_table.in_regions(self._regions[pair.remote])
                pair = attrs.evolve(pair, local_table=local, remote_table=remote)
            pairs.append(pair)
        return attrs.evolve(plan, pairs=tuple(pairs))

    def regions_of(self, worker: Worker) -> tuple[Region, ...]:
        """Return where the regions of a worker are here."""
        return self._regions[worker.key]

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The memory of each region, by the names that regions have here."""
        named = {}
        for (key, name), array in self._arrays.items():
            named[f"{label_of(key)} {name}"] = torch.from_numpy(array)
        return named

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The addresses of all regions, from start to stop."""
        regions = [region for each in self._regions.values() for region in each]
        return [(region.address, region.end) for region in regions]

    def differences(self) -> list[str]:
        """Return where the bytes here are not those of fake memory, or bytes outside changed."""
        wrong = []
        for worker in self.workers:
            for region, here in zip(worker.regions, self._regions[worker.key], strict=True):
                array = self._arrays[worker.key, region.name]
                start = here.address - array.ctypes.data
                stop = start + region.size_bytes
                expected = self._memory.read(worker.key, region.address, region.size_bytes, region.device_id)
                number = int(np.count_nonzero(array[start:stop] != expected))
                outside = int(np.count_nonzero(array[:start]) + np.count_nonzero(array[stop:]))
                if number or outside:
                    wrong.append(f"{worker.label} {region.name}: {number} wrong bytes, {outside} outside")
        return wrong


def randomized(workers: Iterable[Worker], memory: FakeMemory) -> None:
    """Fill all regions with bytes of which none is 0."""
    random = np.random.default_rng(1)
    for worker in workers:
        for region in worker.regions:
            values = random.integers(1, 256, region.size_bytes, np.uint8)
            memory.write(worker.key, region.address, values, region.device_id)


Binder = Callable[[TransferPlan, Mapping[str, Any]], Iterable[BoundCopy]]


def without_ids(plan: TransferPlan, request: Mapping[str, Any]) -> Iterable[BoundCopy]:
    """Bind a request's block tables alone."""
    return CopyPlan(plan).bind(**request).values()


def with_ids(plan: TransferPlan, request: Mapping[str, Any]) -> Iterable[BoundCopy]:
    """Bind the ids that the plan lists."""
    for spec in plan.bind(**request):
        if spec.local_ids.size:
            tables = plan.direction.by_role(spec.local_table, spec.remote_table)
            yield copy_of_spec(spec, tables, plan.operation == "READ")


def moved(
    workers: Iterable[Worker],
    plans: Iterable[TransferPlan],
    request_of: Callable[[TransferPlan], Mapping[str, Any]],
    mover: Any,
    change: Callable[[BoundCopy], BoundCopy] = lambda bound: bound,
    bind: Binder = without_ids,
) -> list[str]:
    """Carry a request out by a kernel, and by fake memory, and return where bytes differ.

    ``mover`` begins copies, or makes what does of the tensors of all regions.
    """
    workers = tuple(workers)
    with FakeMemory(workers) as memory:
        randomized(workers, memory)
        real = RealMemory(workers, memory)
        if isinstance(mover, type):
            mover = mover(real.tensors)
        mover.regions = real.spans
        for plan in plans:
            request = request_of(plan)
            for spec in plan.bind(**request):
                memory.execute(spec)
            for bound in bind(real.plan(plan), request):
                mover.begin(change(bound))
        return real.differences()
