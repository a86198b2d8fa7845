"""Streams, CUDA graphs and threads: the work goes where PyTorch's own would go."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import haloconv
from haloconv import plan
from tests import oracle
from tests.cases import case, make
from tests.families import DIRECT, Subject, each_subject

ONE = case("streams", "two tiles of everything", (4, 16, 40, 70), (24, 3, 3), padding=1)
BUSY_CYCLES = 40_000_000


@pytest.mark.parametrize("subject", each_subject(), ids=str)
def test_work_is_queued_on_the_current_stream(subject: Subject) -> None:
    """The inputs are written late on a side stream; a launch on any other stream would read the old values."""
    one = subject.on(ONE, torch.float32)
    t = make(one, torch.float32, "cuda")
    for result in subject.results:
        oracle.run(result, t, one)
    stale = t._replace(x=torch.zeros_like(t.x), w=torch.zeros_like(t.w), dy=torch.zeros_like(t.dy))
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(BUSY_CYCLES)
        stale.x.copy_(t.x)
        stale.w.copy_(t.w)
        stale.dy.copy_(t.dy)
        got = {result: oracle.run(result, stale, one) for result in subject.results}
        assert not side.query(), "the call waited for the stream"
    side.synchronize()
    for result, value in got.items():
        oracle.check(result, value, t, one.spec)


@pytest.mark.parametrize("subject", each_subject(), ids=str)
def test_backward_runs_on_the_stream_of_forward(subject: Subject) -> None:
    spec = subject.on(ONE, torch.float32).spec
    t = make(ONE, torch.float32, "cuda")
    x, w, b = (v.detach().requires_grad_() for v in (t.x, t.w, t.b))
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        y = haloconv.conv2d(x, w, b, padding=1, precision=spec.precision, family=subject.name)
        dy = torch.zeros_like(t.dy)
        torch.cuda._sleep(BUSY_CYCLES)
        dy.copy_(t.dy)
        y.backward(dy)
    side.synchronize()
    for result, value in (("dgrad", x.grad), ("wgrad", w.grad), ("bgrad", b.grad)):
        assert value is not None
        oracle.check(result, value, t, spec)


@pytest.mark.parametrize("subject", each_subject(), ids=str)
def test_graph_capture_and_replay(subject: Subject) -> None:
    """Each replay reads the inputs and the weights as they are then."""
    spec = subject.on(ONE, torch.float32).spec
    t = make(ONE, torch.float32, "cuda")
    model = haloconv.Conv2d(16, 24, 3, padding=1, device="cuda", precision=spec.precision, family=subject.name)
    x = t.x.detach().clone().requires_grad_()
    wanted = [x, *model.parameters()]  # weight and bias
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.autograd.grad(model(x), wanted, t.dy)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = model(x)
        grads = torch.autograd.grad(y, wanted, t.dy)
    for seed in (1, 2):
        fresh = torch.randn(x.shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")
        with torch.no_grad():
            x.copy_(fresh)
        model.weight.data.mul_(-seed)
        graph.replay()
        torch.cuda.synchronize()
        now = t._replace(x=fresh, w=model.weight.detach(), b=model.bias.detach())
        for result, value in zip(oracle.RESULTS, (y, *grads), strict=True):
            oracle.check(result, value, now, spec)


def test_capture_that_would_have_to_compile_is_refused() -> None:
    one = case("cold", "a filter that no other test uses", (1, 4, 12, 13), (6, 2, 7))
    one = DIRECT.on(one, torch.float32)
    t = make(one, torch.float32, "cuda")
    with (
        pytest.raises(RuntimeError, match=r"(?s)captured.*before the capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        oracle.run("fprop", t, one)
    torch.cuda.synchronize()
    oracle.check("fprop", oracle.run("fprop", t, one), t, one.spec)


@pytest.mark.parametrize("subject", each_subject(), ids=str)
def test_first_call_of_a_thread(subject: Subject) -> None:
    """A new thread has no CUDA context of its own yet; warm kernels must launch there all the same."""
    one = subject.on(ONE, torch.float32)
    t = make(one, torch.float32, "cuda")
    want = {result: oracle.run(result, t, one) for result in subject.results}
    torch.cuda.synchronize()
    got: dict[str, torch.Tensor] = {}

    def work() -> None:
        for result in subject.results:
            got[result] = oracle.run(result, t, one)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert all(oracle.same_bits(got[result], want[result]) for result in subject.results)


@pytest.mark.parametrize("subject", each_subject(), ids=str)
def test_many_threads_share_one_plan(subject: Subject) -> None:
    """Sixteen threads with inputs of their own: argument blocks and workspaces must not be mixed up."""
    one, results = subject.on(ONE, torch.float32), subject.results
    inputs = [make(ONE, torch.float32, "cuda") for _ in range(16)]
    inputs = [t._replace(x=t.x * (i + 1), dy=t.dy * (i + 1)) for i, t in enumerate(inputs)]
    want = [[oracle.run(result, t, one) for result in results] for t in inputs]
    torch.cuda.synchronize()

    def work(index: int) -> bool:
        with torch.cuda.stream(torch.cuda.Stream()):
            got = [oracle.run(result, inputs[index], one) for _ in range(20) for result in results]
            torch.cuda.current_stream().synchronize()
        return all(oracle.same_bits(value, want[index][i % len(results)]) for i, value in enumerate(got))

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(work, range(16)))


def test_threads_that_compile_the_same_kernel() -> None:
    one = case("raced", "a filter that no other test uses", (1, 4, 12, 13), (6, 5, 7))
    one = DIRECT.on(one, torch.float32)
    t = make(one, torch.float32, "cuda")
    plan.clear_plans()

    def work(_: int) -> torch.Tensor:
        got = oracle.run("fprop", t, one)
        torch.cuda.current_stream().synchronize()
        return got

    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(work, range(16)))
    oracle.check("fprop", results[0], t, one.spec)
    assert all(oracle.same_bits(result, results[0]) for result in results)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("subject", each_subject(), ids=str)
def test_second_device(subject: Subject) -> None:
    one = subject.on(ONE, torch.float32)
    t = make(one, torch.float32, "cuda:1")
    for result in subject.results:
        got = oracle.run(result, t, one)
        assert got.device == t.x.device
        oracle.check(result, got, t, one.spec)
