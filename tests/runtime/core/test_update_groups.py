"""Weights that another process broadcasts to an engine, through torch's own groups."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

import sglang_lite as sgl
from sglang_lite.runtime.models.weights import groups
from sglang_lite.runtime.models.weights.groups import UpdateGroups
from tests.children import stopped
from tests.runtime.core.sender import sender
from tests.runtime.core.test_weight_update import Stream, tokens
from tests.runtime.models.test_new_weights import Q, engine, pair, tensors_of


@pytest.fixture(scope="module")
def llamas(tmp_path_factory):
    return pair("llama-biases", tmp_path_factory.mktemp("llamas"))


@pytest.fixture(scope="module")
def trainer(llamas):
    with sender(llamas[1]) as trainer:
        yield trainer


@pytest.fixture
def running(llamas):
    with engine(llamas[0], dist_timeout=60) as running:
        yield running


def join(running, trainer, name):
    running.init_weights_update_group("127.0.0.1", trainer.group(name), 1, 2, name, "gloo")


def forms(tensors):
    return (
        list(tensors),
        [each.dtype for each in tensors.values()],
        [each.shape for each in tensors.values()],
    )


def test_an_engine_takes_what_its_trainer_sends(running, trainer, llamas):
    tensors = tensors_of(llamas[1])
    old = tokens(running)
    join(running, trainer, "plain")
    with pytest.raises(sgl.ParameterError, match="'plain' is there already"):
        running.init_weights_update_group("127.0.0.1", 1, 1, 2, "plain", "gloo")
    names = list(tensors)
    for part, last in ((names[:5], False), (names[5:], True)):
        trainer.tell("send", "plain", *part)
        given = forms({name: tensors[name] for name in part})
        running.update_weights_from_distributed(
            *given, "plain", flush_cache=last, weight_version="sent"
        )
        if not last:
            assert "weights incomplete" in str(Stream(running).end.result(60))
    with engine(llamas[1]) as other:
        expected = tokens(other)
    assert tokens(running) == expected != old
    assert running.get_model_info()["weight_version"] == "sent"
    running.update_weights(str(llamas[0]))
    trainer.tell("flat", "plain", *names)
    running.update_weights_from_distributed(
        *forms(tensors), "plain", load_format="flattened_bucket"
    )
    assert tokens(running) == expected
    running.destroy_weights_update_group("plain")
    with pytest.raises(sgl.ParameterError, match="no group 'plain'"):
        running.destroy_weights_update_group("plain")


def test_an_engine_in_its_own_process_takes_them_too(trainer, llamas):
    tensors = {Q: tensors_of(llamas[1])[Q]}
    with sgl.Engine(str(llamas[0]), dtype="float32", max_running=4, dist_timeout=60) as running:
        join(running, trainer, "apart")
        trainer.tell("send", "apart", Q)
        running.update_weights_from_distributed(
            *forms(tensors), group_name="apart", weight_version="apart"
        )
        assert torch.equal(torch.tensor(running.get_weights_by_name(Q, 1000)), tensors[Q])
        assert running.get_model_info()["weight_version"] == "apart"


def lost(running, trainer, tensors, lose=lambda: None):
    """Lets a trainer send three of some tensors, and checks what the engine does when it is lost
    then.
    """
    expected = tokens(running)
    join(running, trainer, "lost")
    trainer.tell("send", "lost", *list(tensors)[:3])
    done: list[bool] = []

    def receive():
        with pytest.raises(
            sgl.ModelError, match=r"'lost' has sent no weights: .* The old ones are kept"
        ):
            running.update_weights_from_distributed(*forms(tensors), "lost")
        done.append(True)

    thread = threading.Thread(target=receive)
    thread.start()
    assert tokens(running) == expected  # requests continue meanwhile
    lose()
    thread.join(60)
    assert done
    with pytest.raises(sgl.ParameterError, match="there is no group"):
        running.update_weights_from_distributed(*forms(tensors), "lost")
    assert tokens(running) == expected


def test_a_trainer_that_hangs_changes_nothing(trainer, llamas):
    with engine(llamas[0], dist_timeout=2) as running:
        lost(running, trainer, tensors_of(llamas[1]))


def test_a_trainer_that_dies_changes_nothing(running, llamas):
    with sender(llamas[1]) as trainer:
        lost(running, trainer, tensors_of(llamas[1]), trainer.process.kill)


NORM = "model.layers.0.input_layernorm.weight"
BAD = {
    "a backend": (lambda e: e.init_weights_update_group("127.0.0.1", 1, 1, 2, "g", "mpi"), "neither gloo nor nccl"),
    "no GPU": (lambda e: e.init_weights_update_group("127.0.0.1", 1, 1, 2), "nccl is for an engine on a GPU"),
    "the sender": (lambda e: e.init_weights_update_group("127.0.0.1", 1, 0, 2, "g", "gloo"), "rank_offset: 0 is no"),
    "beyond": (lambda e: e.init_weights_update_group("127.0.0.1", 1, 2, 2, "g", "gloo"), "rank_offset: 2 is no"),
    "a port": (lambda e: e.init_weights_update_group("127.0.0.1", 1 << 16, 1, 2, "g", "gloo"), "is no port"),
    "a text": (lambda e: e.init_weights_update_group("127.0.0.1", "1", 1, 2, "g", "gloo"), "master_port"),
    "lengths": (lambda e: e.update_weights_from_distributed(["a"], ["int8"], [], "g"), "1 names, 1 dtypes and 0 shap"),
    "doubled": (lambda e: e.update_weights_from_distributed(["a"] * 2, ["int8"] * 2, [[1]] * 2, "g"), "a name twice"),
    "nothing": (lambda e: e.update_weights_from_distributed([], [], [], "g"), "names: is empty"),
    "a dtype": (lambda e: e.update_weights_from_distributed(["a"], ["float33"], [[1]], "g"), "'float33' is no dtype"),
    "a shape": (lambda e: e.update_weights_from_distributed(["a"], ["int8"], [[-1]], "g"), r"can't have the shape \[-1"),
    "a huge shape": (lambda e: e.update_weights_from_distributed([Q], ["int8"], [[1 << 50, 1 << 10]], "g"), "the shape"),
    "no shape": (lambda e: e.update_weights_from_distributed([Q], ["int8"], [[1 << 70]], "g"), "is no shape"),
    "no list": (lambda e: e.update_weights_from_distributed(Q, "float32", [[1]], "g"), "names: .* is no list"),
    "no shapes": (lambda e: e.update_weights_from_distributed([Q], ["int8"], [1], "g"), "shapes: 1 is no list"),
    "quantised": (lambda e: e.update_weights_from_distributed([Q], ["qint8"], [[1]], "g"), "'qint8' is no dtype"),
    "no name": (lambda e: e.init_weights_update_group("127.0.0.1", 1, 1, 2, "", "gloo"), "group_name: is empty"),
    "no group": (lambda e: e.update_weights_from_distributed([NORM], ["float32"], [[32]], "g"), "there is no group 'g'"),
    "a format": (lambda e: e.update_weights_from_distributed(["a"], ["int8"], [[1]], "g", load_format="pt"), "'pt' is"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_makes_no_sense_is_refused(one, case):
    call, why = BAD[case]
    with pytest.raises(sgl.ParameterError, match=why):
        call(one)


@pytest.fixture(scope="module")
def one(llamas):
    with engine(llamas[0], dist_timeout=1) as one:
        yield one


def test_a_group_that_nobody_makes_is_told_in_time(one):
    with pytest.raises(sgl.ModelError, match=r"'g' at 127.0.0.1:1 did not come together"):
        one.init_weights_update_group("127.0.0.1", 1, 1, 2, "g", "gloo")


def test_tensors_that_do_not_fit_are_refused_before_they_come(running, trainer, llamas):
    expected = tokens(running)
    join(running, trainer, "unfit")
    trainer.tell("send", "unfit", Q)
    shape = list(tensors_of(llamas[1])[Q].shape)
    for name, dtype, told, why in (
        ("what.weight", "float32", shape, "no place for what.weight"),
        (Q, "float32", [shape[0] // 2, shape[1]], "has shape .*, the config says"),
        (Q, "float32", [shape[0] * 2, shape[1]], "has shape .*, the config says"),
        (Q, "float32", [0], "has shape .*, the config says"),
        (Q, "int32", shape, "is stored as torch.int32"),
    ):
        with pytest.raises(sgl.ModelError, match=why):
            running.update_weights_from_distributed([name], [dtype], [told], "unfit")
    assert tokens(running) == expected
    # what was sent all the time
    running.update_weights_from_distributed([Q], ["float32"], [shape], "unfit")
    assert torch.equal(torch.tensor(running.get_weights_by_name(Q, 1000)), tensors_of(llamas[1])[Q])


LIES = {  # what is sent, and what is told to be
    "fewer, of a type": (Q, Q, "float64", False, "less has come"),
    "more, of a type": (Q, Q, "bfloat16", False, "more has come"),
    "another, smaller": (NORM, Q, "float32", False, "less has come"),
    "another, larger": (Q, NORM, "float32", False, "more has come"),
    "fewer, flattened": (NORM, Q, "float32", True, "less has come"),
    "more, flattened": (Q, NORM, "float32", True, "more has come"),
}


@pytest.mark.parametrize("case", LIES)
def test_tensors_of_another_size_than_told_change_nothing(running, trainer, llamas, case):
    sent, told, dtype, flattened, why = LIES[case]
    expected, name = tokens(running), f"lie-{list(LIES).index(case)}"
    join(running, trainer, name)
    trainer.tell("send", name, sent)
    shape, load_format = (
        tensors_of(llamas[1])[told].shape,
        "flattened_bucket" if flattened else None,
    )
    with pytest.raises(
        sgl.ModelError, match=f"{why} than the .* bytes of '{told}'.* The old ones are kept"
    ):
        running.update_weights_from_distributed(
            [told], [dtype], [shape], name, load_format=load_format
        )
    assert tokens(running) == expected


def test_a_group_that_waits_can_be_left_and_keeps_no_other(running, trainer, llamas):
    shape = tensors_of(llamas[1])[Q].shape
    for name in ("waits", "goes"):
        join(running, trainer, name)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(
            running.update_weights_from_distributed, [Q], ["float32"], [shape], "waits"
        )
        trainer.tell("send", "goes", Q)
        running.update_weights_from_distributed([Q], ["float32"], [shape], "goes")
        assert not waits.done()
        running.destroy_weights_update_group("waits")
        with pytest.raises(sgl.SglError, match="the group was left meanwhile"):
            waits.result(30)
    del waits
    gc.collect()  # the group itself does not hold up who lets it go, until its trainer gives up
    trainer.tell("send", "waits", Q)
    join(running, trainer, "later")


def test_what_a_trainer_leaves_incomplete_is_told(trainer, llamas):
    tensors = tensors_of(llamas[1])
    with engine(llamas[0], dist_timeout=1) as running:
        join(running, trainer, "half")
        trainer.tell("send", "half", Q)
        form = ([Q], ["float32"], [tensors[Q].shape])
        running.update_weights_from_distributed(*form, "half", flush_cache=False)
        with pytest.raises(
            sgl.ModelError, match=r"Other weights .* have been written.* update_weights_from_disk"
        ):
            running.update_weights_from_distributed(*form, "half")


def test_an_engine_that_closes_does_not_wait_for_its_trainer(trainer, llamas):
    with engine(llamas[0], dist_timeout=600) as running:
        join(running, trainer, "closing")
        futures: list[BaseException] = []

        def receive():
            with pytest.raises(sgl.SglError) as error:
                running.update_weights_from_distributed(
                    [Q], ["float32"], [tensors_of(llamas[1])[Q].shape], "closing"
                )
            futures.append(error.value)

        thread = threading.Thread(target=receive)
        thread.start()
        with stopped(trainer.process.pid):
            tokens(running)
    thread.join(60)
    assert futures


def test_a_receiver_that_has_died_leaves_no_group_behind(monkeypatch):
    seed, receiver = (UpdateGroups(torch.device("cpu"), 10.0) for _ in range(2))

    def come(name):
        receiver.join(
            "127.0.0.1", seed.host_group("127.0.0.1", 0, name, "gloo"), 1, 2, name, "gloo"
        )

    come("gone")
    receiver.close()
    monkeypatch.setattr(groups, "time", SimpleNamespace(monotonic=lambda: float("inf")))
    come("next")
    with pytest.raises(sgl.ParameterError, match="there is no group 'gone'"):
        seed.send("gone", torch.zeros(1, dtype=torch.uint8))
    receiver.close()
    seed.close()
