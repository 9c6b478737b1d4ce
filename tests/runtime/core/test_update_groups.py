"""Weights that another process broadcasts to an engine, through torch's own groups."""

from __future__ import annotations

import threading

import pytest
import torch

import sglang_lite as sgl
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
    return list(tensors), [each.dtype for each in tensors.values()], [each.shape for each in tensors.values()]


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
        running.update_weights_from_distributed(*given, "plain", flush_cache=last, weight_version="sent")
        if not last:
            assert "weights incomplete" in str(Stream(running).end.result(60))
    with engine(llamas[1]) as other:
        expected = tokens(other)
    assert tokens(running) == expected != old
    assert running.get_model_info()["weight_version"] == "sent"
    running.update_weights(str(llamas[0]))
    trainer.tell("flat", "plain", *names)
    running.update_weights_from_distributed(*forms(tensors), "plain", load_format="flattened_bucket")
    assert tokens(running) == expected
    running.destroy_weights_update_group("plain")
    with pytest.raises(sgl.ParameterError, match="no group 'plain'"):
        running.destroy_weights_update_group("plain")


def test_an_engine_in_its_own_process_takes_them_too(trainer, llamas):
    tensors = {Q: tensors_of(llamas[1])[Q]}
    with sgl.Engine(str(llamas[0]), dtype="float32", max_running=4, dist_timeout=60) as running:
        join(running, trainer, "apart")
        trainer.tell("send", "apart", Q)
        running.update_weights_from_distributed(*forms(tensors), group_name="apart", weight_version="apart")
        assert torch.equal(torch.tensor(running.get_weights_by_name(Q, 1000)), tensors[Q])
        assert running.get_model_info()["weight_version"] == "apart"


def lost(running, trainer, tensors, lose=lambda: None):
    """Lets a trainer send three of some tensors, and checks what the engine does when it is lost then."""
    expected = tokens(running)
    join(running, trainer, "lost")
    trainer.tell("send", "lost", *list(tensors)[:3])
    done: list[bool] = []

    def receive():
        with pytest.raises(sgl.ModelError, match=r"'lost' has sent no weights: .* The old ones are kept"):
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
    "no group": (lambda e: e.update_weights_from_distributed(["a"], ["int8"], [[1]], "g"), "there is no group 'g'"),
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


def test_tensors_that_do_not_fit_are_received_and_change_nothing(running, trainer, llamas):
    expected = tokens(running)
    join(running, trainer, "unfit")
    trainer.tell("send", "unfit", Q)
    with pytest.raises(sgl.ModelError, match=r"no place for what.weight"):
        running.update_weights_from_distributed(["what.weight"], ["float32"], [tensors_of(llamas[1])[Q].shape], "unfit")
    assert tokens(running) == expected


def test_an_engine_that_closes_does_not_wait_for_its_trainer(trainer, llamas):
    with engine(llamas[0], dist_timeout=600) as running:
        join(running, trainer, "closing")
        futures: list[BaseException] = []

        def receive():
            with pytest.raises(sgl.SglError) as error:
                running.update_weights_from_distributed([Q], ["float32"], [tensors_of(llamas[1])[Q].shape], "closing")
            futures.append(error.value)

        thread = threading.Thread(target=receive)
        thread.start()
        with stopped(trainer.process.pid):
            tokens(running)
    thread.join(60)
    assert futures
