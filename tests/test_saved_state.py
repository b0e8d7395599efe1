"""Files of states: what is saved comes back, and no file or state that someone made up does anything but an error."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import random
import zipfile

import numpy as np
import pytest

import qccl


def trained(size: int = 2) -> list[dict]:
    """The states of ranks that have residuals and momenta."""

    def run(comm):
        for step in range(3):
            x = np.random.default_rng([comm.rank, step]).standard_normal(300, np.float32)
            comm.quantized_allreduce(x, codec="minmax4:bucket=64+ef+nesterov:mu=0.5", op="avg", key="w", lr=0.5)
            comm.quantized_allreduce(x, codec="randomk:k=0.3+ef", key="v")
        return comm.state_dict()

    return qccl.run_ranks(size, run)


def saved(state) -> bytes:
    file = io.BytesIO()
    qccl.save_state(file, state)
    return file.getvalue()


def load(data: bytes):
    return qccl.load_state(io.BytesIO(data))


def test_what_is_saved_comes_back(tmp_path):
    import ml_dtypes

    state = {
        "calls": 3,
        "keys": {'layer\'s "w"': {"lr": None, "values": {"residual": np.arange(5, dtype=np.float32)}}},
        "replicas": {1: np.float64([[1, 2], [3, 4]]).T, 2: np.zeros((0, 3), np.float16)},
        "model": np.arange(4).astype(ml_dtypes.bfloat16),
        "list": [True, 2.5, "x", [np.int64(7)], {}],
    }
    path = tmp_path / "state.npz"
    qccl.save_state(path, state)
    found = qccl.load_state(path)
    assert repr(found) == repr(state | {"list": [True, 2.5, "x", [7], {}]})
    assert found["model"].dtype == state["model"].dtype and found["replicas"][2].dtype == np.float16
    assert "state" in np.load(path, allow_pickle=False)
    objects = ({"a": object()}, {"a": np.array(["x"])}, {"a": {1, 2}}, {"a": np.array([object()])})
    for wrong in (*objects, {(1, 2): 3}, {"a": [{(): 1}]}):
        with pytest.raises(qccl.ArgumentError, match="the state contains a"):
            qccl.save_state(io.BytesIO(), wrong)
    with pytest.raises(FileNotFoundError):
        qccl.load_state(tmp_path / "none.npz")


def test_an_older_file_stays_until_the_new_one_is_complete(tmp_path, monkeypatch):
    path, link = tmp_path / "state.npz", tmp_path / "link"
    qccl.save_state(path, {"step": 1})
    path.chmod(0o640)
    link.symlink_to(path)

    def killed(to, **arrays):
        to.write(b"the first bytes")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(np, "savez", killed)
        with pytest.raises(KeyboardInterrupt):
            qccl.save_state(path, {"step": 2})
    assert qccl.load_state(path) == {"step": 1}
    qccl.save_state(link, {"step": 3})
    assert link.is_symlink() and qccl.load_state(path) == {"step": 3}
    assert path.stat().st_mode & 0o777 == 0o640 and sorted(tmp_path.iterdir()) == [link, path]


def test_a_run_goes_on_from_a_file(tmp_path):
    def run(comm):
        def step(number):
            x = np.random.default_rng([comm.rank, number]).standard_normal(300, np.float32)
            return comm.quantized_allreduce(x, codec="minmax2+ef", op="avg", key="w").tobytes()

        step(0)
        path = tmp_path / f"rank{comm.rank}.npz"
        qccl.save_state(path, comm.state_dict())
        expected = step(1)
        comm.load_state_dict(qccl.load_state(path))
        assert step(1) == expected

    qccl.run_ranks(2, run)


class Payload:
    def __reduce__(self):
        return pytest.fail, ("a file was executed",)


def archive_of(**members: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)
    return file.getvalue()


def array_of(values, **announced) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(values) | announced)
    return file.getvalue() + values.tobytes()


def header_of(text: bytes, version: int = 1, announced: int | None = None) -> bytes:
    """An array without elements, whose header may announce more bytes than it has."""
    count = len(text) if announced is None else announced
    return np.lib.format.magic(version, 0) + count.to_bytes(2 if version == 1 else 4, "little") + text


def with_method(data: bytes, method: int) -> bytes:
    """The archive, whose first part claims to be compressed in this way."""
    changed, central = bytearray(data), data.index(b"PK\1\2")
    changed[8:10] = changed[central + 10 : central + 12] = method.to_bytes(2, "little")
    return bytes(changed)


def json_of(text: str) -> bytes:
    return array_of(np.frombuffer(text.encode(), np.uint8))


def test_files_of_others():
    objects = io.BytesIO()
    np.save(objects, np.array([Payload()], object), allow_pickle=True)
    deflated = io.BytesIO()
    np.savez_compressed(deflated, state=np.zeros(1 << 20, np.uint8))
    ones, text = np.ones(3, np.float32), '{"dict": [["a", {"array": "0"}]]}'
    assert load(archive_of(state=json_of(text), **{"0": array_of(ones)}))["a"].tolist() == [1, 1, 1]
    for wrong in (
        pickle.dumps(Payload()),
        objects.getvalue(),
        deflated.getvalue(),
        archive_of(state=objects.getvalue()),
        archive_of(state=json_of(text), **{"0": objects.getvalue()}),
        archive_of(state=json_of(text)),
        archive_of(state=json_of(text), **{"0": array_of(ones, shape=(1 << 58,))}),
        archive_of(state=json_of(text), **{"0": array_of(ones, shape=(-1, -3))}),
        archive_of(state=json_of(text), **{"0": array_of(ones, descr="|O")}),
        archive_of(state=json_of("[" * 100_000)),
        archive_of(state=json_of('{"dict": [[{"list": []}, 1]]}')),
        archive_of(state=json_of('{"dict": 3}')),
        archive_of(state=json_of('{"call": "os.system"}')),
        archive_of(state=json_of("3")),
        archive_of(state=json_of("9" * 5000)),
        *(archive_of(state=header_of(b"(", version)) for version in (1, 2, 3)),
        *(archive_of(state=header_of(b"{'descr': '<f4', ", version)) for version in (1, 2, 3)),
        *(archive_of(state=header_of(b"{", version, announced=100)) for version in (1, 2, 3, 4)),
        with_method(archive_of(state=b"\x09\x14\x05\x00" + b"\xff" * 20), zipfile.ZIP_LZMA),  # invalid options of LZMA
        *(with_method(archive_of(state=json_of("{}")), method) for method in (8, 12, 14, 99)),
        b"",
    ):
        with pytest.raises(qccl.ArgumentError):
            load(wrong)


def damaged(good: bytes, rng: random.Random, where: int) -> bytes:
    """Some of the first ``where`` bytes are others, or the end is missing."""
    data = bytearray(good)
    if rng.random() < 0.2:
        del data[rng.randrange(where) :]
    else:
        for _ in range(rng.choice((1, 1, 5))):
            data[rng.randrange(where)] = rng.randrange(256)
    return bytes(data)


def test_damaged_files():
    """A changed or missing byte gives an error, or a state that load_state_dict() checks."""
    good, rng = saved(trained()[0]), random.Random(0)
    for _ in range(400):
        with contextlib.suppress(qccl.ArgumentError):
            assert isinstance(load(damaged(good, rng, len(good))), dict)


@pytest.mark.filterwarnings("ignore")  # NumPy's, of headers that Python 2 may have written
def test_damaged_arrays_with_the_right_checksum():
    """NumPy's parser sees them, which of a damaged file it hardly does: the archive's checksums find that first."""
    with zipfile.ZipFile(io.BytesIO(saved(trained()[0]))) as archive:
        good = {name.removesuffix(".npy"): archive.read(name) for name in archive.namelist()}
    rng = random.Random(0)
    for _ in range(1000):
        name = rng.choice(list(good))
        header = len(good[name]) if rng.random() < 0.1 else 80  # its text; spaces and the elements follow
        with contextlib.suppress(qccl.ArgumentError):
            assert isinstance(load(archive_of(**good | {name: damaged(good[name], rng, header)})), dict)


JUNK = (None, True, -1, 2**70, 0.5, float("nan"), "x", [], [1, "y"], {}, {"w": 1}, {1: {}}, b"z", object())
JUNK += (np.ones((2, 2)), np.array([np.nan]), np.array(["x"]), np.array(3.0), np.ones(3) * 1j, np.array([object()]))


def places(value, path=()):
    """The paths of a state's parts."""
    yield path
    for key, each in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(each, (*path, key))


def changed(state, path, junk):
    """The state with something else at ``path``."""
    if not path:
        return junk
    state = copy.copy(state)
    state[path[0]] = changed(state[path[0]], path[1:], junk)
    return state


def assert_refused_or_loaded(load, good, same) -> None:
    """For each part of a state that is replaced by junk: ArgumentError, and nothing has changed, or it is loaded."""
    refused = 0
    for path in places(good):
        for junk in JUNK:
            try:
                load(changed(good, path, junk))
            except qccl.ArgumentError:
                refused += 1
                assert same(), (path, junk)
            else:
                load(good)
    assert refused > len(JUNK) * 4  # of the parts, few take anything


def test_states_that_someone_made_up():
    states = trained()

    def run(comm):
        good = states[comm.rank]
        comm.load_state_dict(good)
        wanted = saved(comm.state_dict())
        assert_refused_or_loaded(comm.load_state_dict, good, lambda: saved(comm.state_dict()) == wanted)
        assert saved(comm.state_dict()) == wanted

    qccl.run_ranks(2, run)


def test_states_of_diloco_and_of_decentralized_training_that_someone_made_up():
    def run(comm):
        params = [np.ones((4, 3), np.float32), np.ones(5, np.float16)]
        outer = qccl.DiLoCo(comm, params, codec="minmax4+ef")
        model = qccl.LowPrecisionDecentralized(comm, np.ones(20, np.float32))
        streaming = qccl.DiLoCo(comm, params, fragments=2, period=2, delay=1, key="streaming")  # one is under way
        for each, step in (
            *((outer, outer.step), (streaming, streaming.after_local_step)),
            (model, lambda: model.step(np.full(20, 0.5, np.float32), 0.1)),
        ):
            step()
            good = load(saved(each.state_dict()))
            each.load_state_dict(good)
            wanted = saved(each.state_dict())
            assert wanted == saved(good)
            assert_refused_or_loaded(
                each.load_state_dict, good, lambda wanted=wanted, each=each: saved(each.state_dict()) == wanted
            )

    qccl.run_ranks(2, run)


def test_states_of_compress_that_someone_made_up():
    torch = pytest.importorskip("torch")
    from qccl.torch.groups import Policy, form_groups
    from qccl.torch.state import from_saved, to_saved

    named = {"a.weight": torch.nn.Parameter(torch.zeros(8, 16)), "a.bias": torch.nn.Parameter(torch.zeros(8))}

    def run(comm):
        groups = form_groups(named.items(), Policy("minmax4+ef+nesterov"), 1 << 20)
        good = to_saved(comm, groups, 7)
        for kind in ("residuals", "momenta"):
            for tensor in good[kind].values():
                tensor.copy_(torch.rand(tensor.shape, generator=torch.Generator().manual_seed(comm.rank)))
        everything = {name: value for name, value in good.items() if name not in ("rank", "size", "nodes")}
        for state in (good, everything):
            from_saved(comm, groups, state)
            wanted = saved(comm.state_dict())
            assert_refused_or_loaded(
                lambda junk: from_saved(comm, groups, junk),
                state,
                lambda wanted=wanted: saved(comm.state_dict()) == wanted,
            )

    qccl.run_ranks(2, run)


_FLAT, _TWO, _THREE = (0, 1, 2, 3, 4, 5), (0, 0, 0, 1, 1, 1), (0, 0, 1, 1, 2, 2)


@pytest.mark.parametrize("layouts", [(_FLAT, _TWO), (_TWO, _THREE), (_THREE, _FLAT)], ids=str)
def test_states_of_compress_on_other_nodes(layouts: tuple[tuple[int, ...], ...]) -> None:
    """One rank's state is refused; that of all ranks keeps the total of what their results lack."""
    torch = pytest.importorskip("torch")
    from qccl.torch.groups import Policy, form_groups
    from qccl.torch.state import from_saved, to_full, to_saved

    named = {"weight": torch.nn.Parameter(torch.zeros(256, 1024)), "other": torch.nn.Parameter(torch.zeros(7, 999))}
    states: list = [None] * 6

    def run(comm: qccl.Communicator) -> None:
        groups = form_groups(named.items(), Policy("minmax4+ef"), 1 << 22)

        def add_ranks(total) -> None:
            each = comm.allgather(total.numpy().tobytes())
            total.copy_(torch.from_numpy(np.sum([np.frombuffer(a) for a in each], axis=0)))

        def call() -> None:
            draw = torch.Generator().manual_seed(comm.rank)
            for group in (each for each in groups if each.codec is not None):
                gradients = [torch.randn(p.shape, generator=draw) for p in group.parameters]
                comm.quantized_allreduce_coalesced(gradients, codec=group.codec, op="avg", key=group.key)

        comm.nodes = layouts[0]
        call()
        states[comm.rank] = to_saved(comm, groups, 1)
        before = to_full(comm, groups, 1, add_ranks)
        assert any(tensor.any() for tensor in before["residuals"].values())
        comm.nodes = layouts[1]
        with pytest.raises(qccl.ArgumentError, match=r"the state belongs to ranks on the nodes .* full_state_dict\(\)"):
            from_saved(comm, groups, states[comm.rank])
        for given in (states, before):
            assert from_saved(comm, groups, given) == 1
            after = to_full(comm, groups, 1, add_ranks)
            for name, tensor in before["residuals"].items():
                torch.testing.assert_close(after["residuals"][name], tensor, rtol=1e-5, atol=1e-7)
        call()

    qccl.run_ranks(6, run)
