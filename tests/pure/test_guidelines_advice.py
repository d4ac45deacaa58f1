"""pure: the practitioner's questions, answered from facts."""

from __future__ import annotations

import re

import pytest

from headway.collective.model.link_fit import LinkFit
from headway.graph.layer_algorithms import AlgorithmProfile, LayerAlgorithm
from headway.planner.guidelines.advice import AdviceFacts, guidelines
from headway.planner.guidelines.layer_algorithms import choose_minibatch
from headway.planner.guidelines.layer_parallelism import DasLayer, LayerTimes


def profile(batch):
    fast, slow = (
        LayerAlgorithm("fft", 1.0 * batch, 6.0 * batch),
        LayerAlgorithm("gemm", 2.0 * batch, 0.0),
    )
    return AlgorithmProfile(layers={"conv": [fast, slow]}, rest=1.0, features=batch, parameters=0)


FACTS = AdviceFacts(
    compute=2.0,
    overhead=0.2,
    parameter_bytes=552e6,
    workers=16,
    server_rate=1.25e9,
    link_rate=1.25e9,
    node_rate=1.67e12,
    batch=256,
    layers=[
        DasLayer(ifm=3, ofm=64, kernel=(3, 3), output=(224, 224), input=(224, 224), name="conv"),
        DasLayer(ifm=4096, ofm=4096, name="fc6"),
        DasLayer(ifm=4096, ofm=4096, name="fc7"),
    ],
    times=[LayerTimes(forward=1.0, weight_grad=1.0, input_grad=0.0, num_bytes=2.0)],
    link=LinkFit(0.5, 1.0),
    minibatch=choose_minibatch(profile, [1, 2, 4, 8], memory=30, samples=80),
)


def by_question(facts):
    return {advice.question: advice for advice in guidelines(facts)}


def test_every_fact_gets_its_answer_in_order():
    assert [advice.question for advice in guidelines(FACTS)] == [
        "Which minibatch, and which algorithm for each layer?",
        "How many devices are worth their while?",
        "How many parameter servers?",
        "Can an all-reduce hide behind the compute?",
        "How many samples per node hide the exchange?",
        "How should fc6 and 1 more like it be split?",
        "How much of the gradient exchange shows?",
    ]


def test_the_numbers_are_those_of_the_lemmas():
    found = by_question(FACTS)
    devices = found["How many devices are worth their while?"]
    assert devices.numbers["R_O"] == pytest.approx(0.1)
    assert devices.numbers["G_max"] == 3
    assert devices.numbers["alpha_G"] == pytest.approx(0.4231, abs=5e-5)
    assert "At most 3 for 80% efficiency" in devices.answer
    servers = found["How many parameter servers?"]
    assert servers.numbers["N_ps"] == 8
    split = found["How should fc6 and 1 more like it be split?"]
    assert (split.numbers["G"], split.numbers["ideal"]) == (1, 1)
    assert split.numbers["data"] == 2 * 4 * 4096**2
    shown = found["How much of the gradient exchange shows?"]
    assert shown.numbers["exposed"] == 2.5
    batch = found["Which minibatch, and which algorithm for each layer?"]
    assert batch.numbers["X_mini"] == 4
    assert "conv fft" in batch.answer


def test_the_exchange_is_hidden_exactly_when_it_is_shorter():
    for compute, word in ((0.8, "No"), (0.9, "Yes")):  # 2 * 15/16 * 552e6 / 1.25e9 = 0.828
        facts = AdviceFacts(compute=compute, parameter_bytes=552e6, workers=16, link_rate=1.25e9)
        (advice,) = guidelines(facts)
        assert advice.answer.startswith(word)
        assert advice.numbers["seconds"] == pytest.approx(0.828)


def test_nothing_is_said_of_what_is_not_known():
    assert guidelines(AdviceFacts()) == []
    (advice,) = guidelines(AdviceFacts(compute=1.0, overhead=0.0))
    assert advice.answer.startswith("Any number")


def test_an_answer_is_text_with_its_source():
    for advice in guidelines(FACTS):
        assert re.search(r"(Zou|Das) et al\. 201[67]", str(advice))
        assert advice.numbers
        assert "\n  (" in str(advice)
