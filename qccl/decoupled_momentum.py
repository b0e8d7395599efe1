"""DeMo: each rank keeps its own momentum, and the ranks exchange its strongest components in each step."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from qccl import dct, parameters
from qccl.arguments import count_of, integer
from qccl.codecs import TopK
from qccl.communicator import Communicator
from qccl.errors import ArgumentError, MismatchError, QcclError
from qccl.scalars import as_real
from qccl.tiles import Tiles
from qccl.work import Work

__all__ = ["DeMo"]


class DeMo:
    """SGD by signs with decoupled momentum (Peng, Quesnelle and Kingma 2024, arXiv 2411.19870).

    A step on rank i, for each tile of a parameter, with ``m_i`` the DCT-II of the rank's momentum::

        m_i = decay m_i + lr DCT(g_i)
        q_i = the k coefficients of m_i of greatest magnitude, encoded; the others are 0
        m_i = m_i - q_i
        q   = for each coefficient the mean over the ranks that sent it
        p  -= lr sign(inverse DCT(q))

    The rule is that of the authors' program (github.com/bloc97/DeMo), which keeps the inverse DCT of ``m_i``. All ranks
    compute the signs from equal coefficients in exact arithmetic, so parameters remain the same bits on all ranks, also
    on unequal processors.

    A rank alone sends nothing, and so its steps are those of SGD by signs, without momentum. The gathered coefficients
    take as much memory as the parameters in float32, once for each rank.

    Attributes:
        params: the parameters.
        lr: the learning rate of the next step, the same on all ranks; a schedule may set it between steps.
        steps: the number of steps so far.
    """

    def __init__(
        self,
        comm: Communicator,
        params: Any,
        *,
        lr: float,
        decay: float = 0.999,
        k: int = 32,
        chunk: int = 64,
        values: str = "exact",
        weight_decay: float = 0.0,
    ) -> None:
        """Collective: all ranks continue from rank 0's parameters, which are written to ``params``.

        Args:
            comm: the ranks.
            params: an array, a list of arrays or a dict of them, of float32, float16 or bfloat16 (NumPy, torch, CuPy),
                which each step changes in place.
            lr: the learning rate: how far a step moves each element.
            decay: of the momentum in each step, from 0 to below 1.
            k: coefficients that a rank sends of each tile.
            chunk: the longest side of a tile, 1 to 128; its sides divide those of the matrix. An array of more than two
                dimensions is a matrix whose rows are its first dimension; one of fewer is a row. A side without a great
                divisor below, such as a prime, makes small tiles, of which ``k`` coefficients save little or nothing:
                pad or reshape such an array.
            values: how coefficients are encoded, as in qccl.codecs.TopK: "exact", "float16", "exp4" or "mean2".
            weight_decay: a step multiplies the parameters by ``1 - lr weight_decay``, as in AdamW.

        Raises ArgumentError for other values, and MismatchError if the ranks' parameters or arguments differ.
        """
        self._weight_decay = _number(weight_decay, "weight_decay")
        self.lr, self.steps, self.comm, self.params = _number(lr, "lr"), 0, comm, params
        if not 1 <= integer(chunk, "chunk") <= dct.LONGEST:
            raise ArgumentError(f"chunk must be the longest side of a tile, 1 to {dct.LONGEST}, not {chunk!r}")
        if integer(k, "k") < 1:
            raise ArgumentError(f"k must be the number of coefficients to send of each tile, 1 or more, not {k!r}")
        self._names, self._forms = parameters.names_of(params), self._forms_of(params)
        self._arrays = [parameters.plain(array) for _, array in parameters.named(params)]
        self._tiles = [Tiles(shape, chunk) for _, shape in self._forms]
        self._members = [number for number, (_, shape) in enumerate(self._forms) if 0 not in shape]
        self._transform, self._decay = dct.CosineTransform(), _number(decay, "decay")
        if self._decay >= 1:
            raise ArgumentError(f"decay must be a number from 0 to below 1, not {decay!r}")
        lengths = {number: each.height * each.width for number, each in enumerate(self._tiles)}
        self._groups = [
            _Group([n for n in self._members if lengths[n] == length], length, k, values, self._tiles, self._arrays)
            for length in sorted({lengths[number] for number in self._members})
        ]
        self._commit = parameters.Commit("restore the parameters and call load_state_dict() on all ranks")
        self._check_agreement(chunk)
        for array in self._arrays:
            comm.quantized_broadcast(array, root=0, codec="none")

    def step(self, gradients: Any = None) -> Any:
        """Collective: one step; returns the parameters.

        ``gradients`` are those of this rank, in the structure of the parameters; None takes them from the attribute
        ``grad`` of PyTorch's parameters, where a parameter without one counts as one with a gradient of zeros.

        Raises ArgumentError on all ranks, and changes neither parameters nor momenta, if a momentum or a mean of the
        ranks' momenta is not finite. After any other exception in a step, such as Ctrl-C, the ranks may have different
        parameters: further steps of this rank raise ArgumentError until load_state_dict().
        """
        self._commit.check()
        lr, given = _number(self.lr, "lr"), self._gradients(gradients)
        momenta = [self._next(group, given, lr) for group in self._groups]
        with self._commit:  # when a gather has ended here, other ranks may go on with the step
            gathered = _ended([self._gather(*each) for each in zip(self._groups, momenta, strict=True)])
            means = [_means(sent) for sent in gathered]
            for group, momentum, sent, mean in zip(self._groups, momenta, gathered, means, strict=True):
                momentum -= sent[self.comm.rank]
                group.momentum = momentum
                for number, rows in group.rows.items():
                    self._move(self._arrays[number], self._tiles[number], mean[rows, : group.length], lr)
            self.steps += 1
        return self.params

    def state_dict(self) -> dict[str, Any]:
        """Copies of this rank's momenta, with the number of steps and the learning rate; each rank saves its own."""
        self._commit.check()
        momenta = [parameters.copy_of(group.momentum) for group in self._groups]
        return {"momenta": momenta, "steps": self.steps, "lr": self.lr}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Collective: continue from a state_dict(), after the parameters were restored.

        Raises ArgumentError for anything else, and MismatchError if another rank's state is not one or has another
        learning rate. Then no rank changes anything.
        """
        rate, refused = math.nan, None
        try:
            momenta, steps, rate = self._checked(state)
        except ArgumentError as error:
            refused = error
        rates = [struct.unpack("<d", each)[0] for each in self.comm.allgather(struct.pack("<d", rate))]
        if refused is not None:
            raise refused
        if any(each != rate for each in rates):
            raise MismatchError(
                f"the learning rates of the ranks' states are {rates} (nan: the state was refused); load on all ranks "
                'with one rate: load_state_dict(state | {"lr": rate})'
            )
        with self._commit:
            for group, saved in zip(self._groups, momenta, strict=True):
                group.momentum[...] = saved
            self.steps, self.lr = steps, rate

    def _checked(self, state: Any) -> tuple[list[Any], int, float]:
        """The momenta, the steps and the learning rate of a state."""
        if not isinstance(state, Mapping) or set(state) != {"momenta", "steps", "lr"}:
            raise ArgumentError("a state is the dict that state_dict() returned, with momenta, steps and lr")
        steps, lr = count_of(state["steps"], 'the state\'s "steps"'), _number(state["lr"], 'the state\'s "lr"')
        momenta = [group.momentum for group in self._groups]
        found = self._forms_of(state["momenta"], "the state's momenta", writable=False)
        wanted = self._forms_of(momenta, "momenta")
        if found != wanted:
            raise ArgumentError(
                f"the state has momenta of the types and shapes {found}; these parameters have {wanted}"
            )
        return [saved for _, saved in parameters.named(state["momenta"])], steps, lr

    def _next(self, group: _Group, gradients: list[Any], lr: float) -> Any:
        """The momenta of a group with these gradients, before any are sent."""
        momentum = parameters.times(group.momentum, self._decay)
        for number, rows in group.rows.items():
            if gradients[number] is not None:
                coefficients = self._transform.forward(self._tiles[number].split(gradients[number]))
                momentum[rows, : group.length] += coefficients.reshape(-1, group.length) * lr
        return momentum

    def _gather(self, group: _Group, momentum: Any) -> Work:
        """Start to gather what all ranks send of a group: ranks x tiles x coefficients, in float32."""
        rows, block = momentum.shape
        sent = parameters.vector(momentum, [0.0], "float32").repeat(self.comm.size * rows * block)
        sent = sent.reshape(self.comm.size, rows, block)
        work: Work = self.comm.quantized_all_gather(momentum, sent, codec=group.codec, nonfinite="error", async_op=True)
        return work

    def _move(self, array: Any, tiles: Tiles, means: Any, lr: float) -> None:
        """Change a parameter. Each operation rounds once, so that all ranks get the same bits on any processor."""
        coefficients = means.reshape(tiles.number, tiles.height, tiles.width)
        change = parameters.copy_of(array)
        change[...] = tiles.join(self._transform.inverse_signs(coefficients))
        change *= lr
        if self._weight_decay:
            array *= 1 - lr * self._weight_decay
        array -= change

    def _gradients(self, given: Any) -> list[Any]:
        """The gradients in the order of the parameters; None for one that a parameter of PyTorch lacks."""
        if given is None:
            found = [getattr(array, "grad", None) for _, array in parameters.named(self.params)]
            if self._members and all(gradient is None for gradient in found):
                raise ArgumentError("no parameter has a gradient; call step(gradients), or backward() before")
            return [parameters.plain(gradient) for gradient in found]
        names, named = parameters.names_of(given), parameters.named(given, "gradients")
        for name, gradient in named:
            if not hasattr(gradient, "shape"):
                raise ArgumentError(f"{name} must be an array with the shape of its parameter, not {gradient!r}")
        shapes = [tuple(gradient.shape) for _, gradient in named]
        wanted = [shape for _, shape in self._forms]
        if names != self._names or shapes != wanted:
            raise ArgumentError(
                f"gradients must have the names and shapes of the parameters, {self._names} and {wanted}, not {names} "
                f"and {shapes}"
            )
        return [_like(array, gradient, name) for array, (name, gradient) in zip(self._arrays, named, strict=True)]

    def _forms_of(self, params: Any, what: str = "params", *, writable: bool = True) -> list[parameters.Form]:
        """The element types and shapes of arrays."""
        read, named = self.comm._memory.from_array, parameters.named(params, what)
        return [parameters.form_of(read(parameters.plain(each), writable=writable, what=name)) for name, each in named]

    def _check_agreement(self, chunk: int) -> None:
        """Raise MismatchError on all ranks unless they have the same parameters and arguments.

        The bases are part of it: libraries may compute a cosine differently in its last bit.
        """
        bases = [dct.basis(n) for n in sorted({n for each in self._tiles for n in (each.height, each.width)})]
        codecs = [group.codec.spec() for group in self._groups]
        rule = self.lr, self._decay, chunk, self._weight_decay
        said = f"{self._names} {self._forms} {codecs} {rule} {bases}"
        found = self.comm.allgather(hashlib.sha256(said.encode()).digest())
        others = [rank for rank, digest in enumerate(found) if digest != found[0]]
        if others:
            raise MismatchError(f"ranks {others} have other parameters, or other arguments of DeMo, than rank 0")


class _Group:
    """The arrays with tiles of the same number of elements, which travel in one call.

    Attributes:
        length: elements of a tile.
        rows: by the number of the array, the rows of its tiles.
        codec: of the coefficients; a block of it is a tile, with zeros behind it up to a multiple of 8.
        momentum: coefficients of this rank, tiles x block, in float32.
    """

    def __init__(
        self, members: list[int], length: int, k: int, values: str, tiles: Sequence[Tiles], arrays: Sequence[Any]
    ) -> None:
        block, self.length, end = -(-length // 8) * 8, length, 0
        self.codec, self.rows = TopK(min(k, length), block, values), dict[int, slice]()
        for number in members:
            self.rows[number] = slice(end, end := end + tiles[number].number)
        self.momentum = parameters.vector(arrays[members[0]], [0.0], "float32").repeat(end * block).reshape(end, block)


def _like(array: Any, gradient: Any, name: str) -> Any:
    """A gradient in the library of ``array``, its parameter; a copy in float32 if it is of another one."""
    gradient = parameters.plain(gradient)
    if type(gradient) is type(array):
        return gradient
    found = parameters.converted(parameters.copy_of(array), "float32")
    try:
        found[...] = gradient
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(
            f"{name} is of type {type(gradient).__name__}, which cannot be copied into one of {type(array).__name__}, "
            f"the type of the parameter ({error}); convert it before"
        ) from error
    return found


def _ended(works: Sequence[Work]) -> list[Any]:
    """The results of calls that are under way together, which is one delay of the network in place of one for each.

    Raises the first error when all have ended.
    """
    results: list[Any] = []
    failed: QcclError | None = None
    for work in works:
        try:
            results.append(work.wait())
        except QcclError as error:
            failed = failed or error
    if failed is not None:
        raise failed
    return results


def _means(sent: Any) -> Any:
    """The mean of each coefficient over the ranks that sent it, added in the order of the ranks.

    Raises ArgumentError if a sum overflows: on all ranks, which have the same coefficients.
    """
    import numpy as np

    sums = parameters.zeros_like(sent[0])
    for slab in parameters.slabs(sums):
        part = sums[slab]
        senders = parameters.zeros_like(part)
        with np.errstate(over="ignore"):
            for each in sent[:, slab]:
                part += each
                senders += each != 0
        if not math.isfinite(abs(part).max()):
            raise ArgumentError("the sum of the ranks' momenta is not finite in float32; a lower lr makes them smaller")
        senders += senders == 0
        part /= senders
    return sums


def _number(value: Any, what: str) -> float:
    number = as_real(value)
    if number is None or not 0 <= number < math.inf:
        raise ArgumentError(f"{what} must be a finite number, 0 or more, not {value!r}")
    return float(number)
