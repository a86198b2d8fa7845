"""fp32 with TF32 off: what says no precision may run in tf32x3, within fp32's own limits; precision="ieee" may not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import haloconv
from haloconv import plan, reference
from haloconv.choose import choice as choices
from haloconv.choose.choice import choose
from haloconv.choose.records import forget_shelves, records_path, write_records
from haloconv.cli.tune import Order, _of_targets
from haloconv.device import Device, DeviceFacts, set_stand_in
from haloconv.emulator import emulated_device
from haloconv.export.export import export
from haloconv.families.files import device_hash
from haloconv.precision import Precision, convolution_precision
from haloconv.problem import DIRECTIONS, ConvSpec, Direction, Problem, dense_request
from haloconv.tune import measure
from haloconv.tune.measure import ATEN, candidates
from haloconv.tune.problems import problems_of
from tests import oracle
from tests.cases import DENORMAL_PARTNER, Case, Tensors, case, case_id, generator, make, store
from tests.cpu.test_export import families_of, problem
from tests.cpu.test_tf32x3 import error_of, on_emulator
from tests.exact import integers
from tests.specials import special_activations
from tests.tuned import Clock, FakeFamily, fake_gpu, favouring, only, record
from tools.fingerprint import recording

CPU = torch.device("cpu")
H200 = DeviceFacts("NVIDIA H200", "sm_90a", 132, (9, 0), 141 << 30, 232_448, "none")
MANY = Problem("fprop", 16, 32, 64, 64, 32, 3, 3, padding=(1, 1, 1, 1), precision="tf32x3")  # that the rule names
CASES = (  # as a caller writes them: no family, no precision
    case("default_3x3", "a dense layer", (1, 16, 9, 20), (24, 3, 3), padding=1, bias=True),
    case("default_nhwc", "a dilated one", (2, 16, 7, 13), (16, 3, 2), padding=(1, 2), dilation=2,
         storage="channels_last"),
)  # fmt: skip
DENSE = ("fprop", "dgrad", "wgrad")


def posed(direction: Direction, dtype: torch.dtype, asked: Precision | None) -> Problem:
    """The problem that a call poses."""
    spec = ConvSpec(padding=(1, 1, 1, 1), precision=asked)
    return plan.problem_of(direction, (1, 8, 6, 6), (8, 8, 3, 3), spec, dtype, "nchw")


@pytest.mark.parametrize(
    ("setting", "asked", "products"),
    [("ieee", None, "tf32x3"), ("ieee", "ieee", "ieee"), ("ieee", "tf32", "tf32"), ("ieee", "tf32x3", "tf32x3"),
     ("tf32", None, "tf32"), ("tf32", "ieee", "ieee"), ("tf32", "tf32x3", "tf32x3")],
)  # fmt: skip
def test_a_precision_that_is_said_holds_and_none_follows_pytorchs_setting(
    setting: Precision, asked: Precision | None, products: Precision
) -> None:
    """Of fp32; values of other types, as autocast makes them, are multiplied as they are."""
    with convolution_precision(setting):
        assert {posed(each, torch.float32, asked).precision for each in DIRECTIONS} == {products}
        for dtype in (torch.float16, torch.bfloat16, torch.float64):
            assert posed("fprop", dtype, asked).precision == "ieee"


# Values ---------------------------------------------------------------------------------------------------------------


def plan_of(result: str, t: Tensors, one: Case) -> plan.Plan:
    """The plan that ``oracle.run`` runs."""
    if result == "fprop":
        return plan.plan_fprop(t.x, t.w, t.b, one.spec)
    if result == "dgrad":
        return plan.plan_dgrad(t.dy, t.w, tuple(t.x.shape), oracle.layout_of(one.storage), one.spec)
    return plan.plan_wgrad(t.dy, t.x, tuple(t.w.shape), oracle.layout_of(one.w_storage), one.spec)


@pytest.mark.parametrize("result", DENSE)
@pytest.mark.parametrize("one", CASES, ids=case_id)
@on_emulator
def test_integers_of_13_bits_are_summed_exactly(one: Case, result: str) -> None:
    """TF32 keeps 11 bits: here low terms count, of one operand after the other. The plan says what ran."""
    t, gen = make(one, torch.float32), generator(f"{one.name} {result}", CPU)
    operands = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}[result]
    for wide in operands:
        exact = t._replace(b=None)
        for name in operands:
            value, most = getattr(t, name), (1 << 13) - 1 if name == wide else 1
            exact = exact._replace(**{name: store(integers(value.shape, value.dtype, gen, most), one.storage)})
        with convolution_precision("ieee"), emulated_device(seed=1, sm_count=2):
            got, ran = oracle.run(result, exact, one), plan_of(result, exact, one)
        oracle.check_exact(result, got, exact, one.spec)
        assert (ran.choice.family, ran.problem.precision_label) == ("halo_sm90", "tf32x3")
        assert "terms2" in ran.choice.config or result == "wgrad", "a key of wgrad's does not say it"
        assert ran.choice.reason.endswith("; computed in tf32x3")


@pytest.mark.parametrize("result", DENSE)
@pytest.mark.parametrize("one", CASES, ids=case_id)
@on_emulator
def test_errors_stay_below_the_limits_of_fp32(one: Case, result: str) -> None:
    for kind in ("normal", "positive", "wide", "cancellation"):
        with convolution_precision("ieee"):
            error, limits, by_scale = error_of(result, make(one, torch.float32, kind=kind), one)
        norm = by_scale if kind == "cancellation" else error.norm
        assert norm < limits.norm, f"{kind}: {norm:.2e}, {limits}"
        assert error.worst < limits.element + limits.rounding, f"{kind}: {error}, {limits}"


@pytest.mark.parametrize("result", DENSE)
@on_emulator
def test_infinities_and_nan_stand_where_fp32_has_them(result: str) -> None:
    for one in CASES:
        t, want = special_activations(result, one, torch.float32, "cpu")
        with convolution_precision("ieee"), emulated_device(seed=1, sm_count=2):
            got = oracle.run(result, t, one)
        oracle.check(result, got, t, one.spec, want=want)
        assert not got.isfinite().all()


@on_emulator
def test_denormal_numbers_lose_bits_and_are_not_flushed() -> None:
    """Of what docs/precision.md says of them: 2^-137 of a factor at most, where ieee keeps all."""
    one = replace(CASES[0], bias=False)
    t = make(one, torch.float32, kind="denormal")
    t = t._replace(w=t.w * DENORMAL_PARTNER[torch.float32])
    want = oracle.expected("fprop", t, one.spec)
    lost = oracle.expected("fprop", t._replace(x=torch.ones_like(t.x)), one.spec).scale * 2.0**-137
    limits = oracle.limits_of("fprop", t, one.spec)
    for precision, more in ((None, lost), ("ieee", 0 * lost)):
        with convolution_precision("ieee"), emulated_device(seed=1):
            got = oracle.run("fprop", t, replace(one, spec=one.spec._replace(precision=precision)))
        assert ((got.double() - want.value).abs() <= (limits.element + limits.rounding) * want.scale + more).all()
        small = reference.measure_error(got, want, limits).norm < limits.norm
        assert small is (precision == "ieee")


@on_emulator
def test_a_layer_trains_and_its_gradients_have_gradients() -> None:
    """Against float64, within 2e-6: products of one TF32 value each err by more than 1e-4."""
    torch.manual_seed(0)
    layer, x = haloconv.Conv2d(8, 16, 3, padding=1), torch.randn(1, 8, 6, 9)
    truth, given = torch.nn.Conv2d(8, 16, 3, padding=1, dtype=torch.float64), x.double()
    truth.load_state_dict({name: value.double() for name, value in layer.state_dict().items()})

    def results(module: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        x = x.clone().requires_grad_()
        y = module(x)
        first = torch.autograd.grad(y.pow(3).sum(), [x, module.weight], create_graph=True)
        return [y, *first, *torch.autograd.grad(sum(each.pow(2).sum() for each in first), [x, module.weight])]

    with convolution_precision("ieee"), emulated_device() as device:
        got = results(layer, x)
        assert device.launches >= 6
        assert "precision=tf32x3 (PyTorch's setting), family=auto -> halo_sm90" in repr(layer)
        assert "computed in tf32x3" in repr(layer)
    for one, other in zip(got, results(truth, given), strict=True):
        assert ((one.double() - other).norm() / other.norm()).item() < 2e-6


# Choices --------------------------------------------------------------------------------------------------------------


@contextmanager
def gpu(facts: DeviceFacts = H200) -> Iterator[None]:
    """CPU tensors count as that GPU's, and are chosen for by records and rules."""
    with pytest.MonkeyPatch.context() as patch:
        set_stand_in(Device(facts, load=None, encode_tiled=None))
        patch.setattr(choices, "stand_in", lambda: None)
        try:
            yield
        finally:
            set_stand_in(None)


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Records of the user's lie in an empty folder."""
    monkeypatch.setenv("HALOCONV_RECORDS_DIR", str(tmp_path))
    forget_shelves()
    yield
    forget_shelves()


WIDE = {"direction": "wgrad", "h": 512, "w": 512, "r": 5, "s": 9, "padding": (0, 0, 0, 0)}


@pytest.mark.usefixtures("shelf")
@pytest.mark.parametrize(
    ("changes", "family"),
    [({}, "halo_sm90"), ({"direction": "dgrad"}, "halo_sm90"), ({"direction": "wgrad"}, "halo_sm90"),
     ({"direction": "wgrad", "c": 256, "k": 256}, "aten"),
     (WIDE, "halo_sm90"), (WIDE | {"layout": "nhwc"}, "halo_sm90"),
     (WIDE | {"c": 256, "k": 256, "n": 1}, "halo_sm90"), ({"n": 1, "h": 56, "w": 56}, "halo_sm90"),
     ({"n": 1, "h": 48, "w": 56}, "aten"), ({"groups": 8, "n": 1}, "direct"),
     ({"r": 5, "s": 5, "n": 1, "h": 48, "w": 56}, "aten")],
)  # fmt: skip
def test_auto_takes_what_the_rule_names_and_else_what_full_fp32_gets(changes: dict, family: str) -> None:
    asked = replace(MANY, **changes)
    with gpu():
        found, exact = choose(asked, CPU), choose(replace(asked, precision="ieee"), CPU)
    assert found.family == family and exact.family != "halo_sm90" and "computed" not in exact.reason
    in_terms = family == "halo_sm90"
    assert found.reason.endswith("; computed in tf32x3" if in_terms else f"{exact.reason}; computed in full fp32")


@pytest.mark.usefixtures("shelf")
def test_on_another_architecture_all_is_as_with_ieee() -> None:
    a100 = DeviceFacts("NVIDIA A100", "sm_80", 108, (8, 0), 80 << 30, 166_912, "none")
    with gpu(a100):
        for direction in DIRECTIONS:
            found, exact = (choose(replace(MANY.toward(direction), precision=each), CPU) for each in ("tf32x3", "ieee"))
            assert found.family == exact.family and found.reason == f"{exact.reason}; computed in full fp32"


@pytest.mark.usefixtures("shelf")
def test_records_of_its_own_come_first_then_the_rule_then_records_of_full_fp32() -> None:
    wgrad = replace(MANY.toward("wgrad"), c=256, k=256)  # that no rule names
    exact, exact_wgrad = (replace(each, precision="ieee") for each in (MANY, wgrad))
    with gpu():
        write_records(records_path(H200.name), [record(each, "direct", H200) for each in (exact, exact_wgrad)], H200)
        forget_shelves()
        assert choose(MANY, CPU).family == "halo_sm90", "which that record did not know"
        assert choose(wgrad, CPU).family == choose(exact_wgrad, CPU).family == "direct"
        assert choose(exact_wgrad, CPU).measured and not choose(wgrad, CPU).measured, "first use may measure it"
        assert choose(wgrad, CPU).reason.endswith("; computed in full fp32")
        kernel = "halo_sm90/wgrad"
        in_terms = record(wgrad, "halo_sm90", H200, kernel=kernel, own=kernel, source=device_hash(kernel))
        write_records(records_path(H200.name), [record(MANY, "aten", H200), in_terms], H200)
        forget_shelves()
        assert choose(MANY, CPU).family == "aten" and choose(wgrad, CPU).family == "halo_sm90"
        assert choose(MANY, CPU).measured and choose(wgrad, CPU).measured
        assert choose(exact, CPU).family == choose(exact_wgrad, CPU).family == "direct", "ieee follows its own"


# Tuning and exports ---------------------------------------------------------------------------------------------------


def model() -> torch.nn.Module:
    """Layers that say nothing, and each of the precisions."""
    said: tuple[Precision | None, ...] = (None, "ieee", "tf32", "tf32x3")
    return torch.nn.Sequential(*(haloconv.Conv2d(8, 8, 3, padding=1, precision=each) for each in said))


def test_tuning_with_tf32_off_has_three_products_among_the_candidates_and_pytorch_in_full() -> None:
    with convolution_precision("ieee"), recording():
        problems = problems_of(model(), torch.randn(1, 8, 16, 16))
        found = {each.layer: candidates(dense_request(each.problem, CPU)) for each in problems}
    products = [each.problem.precision for each in problems if each.problem.direction == "wgrad"]
    assert products == ["tf32x3", "ieee", "tf32", "tf32x3"]
    families = {layer: {each.family for each in those} for layer, those in found.items()}
    assert families["0"] == families["3"] == {"aten", "direct", "halo_sm90"} and ATEN in found["0"]
    assert families["1"] == {"aten", "direct"}


def test_what_tune_records_is_followed_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    special = FakeFamily("special", takes=lambda problem: problem.precision == "tf32x3", tensor_cores=True)
    monkeypatch.setattr(measure, "compare", Clock(favouring("special")))
    layers, x = model()[:2], torch.randn(1, 8, 16, 16)
    with convolution_precision("ieee"), fake_gpu(tmp_path), only(FakeFamily("direct"), special):
        report = haloconv.tune(layers, x, directions=("fprop",), progress=False)
        layers(x)
        told = [layer.choice() for layer in layers]
    assert [(row.precision, row.family) for row in report.rows] == [("tf32x3", "special"), ("fp32", "aten")]
    assert report.rows[0].reason.endswith("; computed in tf32x3") and "computed" not in report.rows[1].reason
    assert [(each.family, each.reason) for each in told] == [(row.family, row.reason) for row in report.rows]
    assert all(each.measured for each in told)


@pytest.mark.parametrize(("label", "products"), [("tf32x3", "tf32x3"), ("fp32", "tf32x3"), ("tf32", "tf32")])
def test_tune_asks_no_layer_for_another_precision_than_it_says(label: str, products: str, tmp_path: Path) -> None:
    """The command's --precision is that of layers that say none."""
    said = "nn.Sequential(haloconv.Conv2d(4, 8, 3), haloconv.Conv2d(8, 8, 3, precision='ieee'))"
    path = problem(tmp_path, said, head="import haloconv\nimport torch\nfrom torch import nn\n")
    order = Order([str(path)], None, [], [], list(DIRECTIONS[:1]), [label], ["nchw"], 1, 8, False, False)
    assert [each.problem.precision for each in _of_targets(order, CPU)] == [products, "ieee"]


def test_an_export_follows_the_setting(tmp_path: Path) -> None:
    path = problem(tmp_path, "nn.Conv2d(32, 32, 3, padding=1)", "self.conv(torch.zeros(16, 32, 64, 64))")
    with convolution_precision("ieee"):
        text = export(path, arch="sm_90a")
        assert families_of(text) == dict.fromkeys(DIRECTIONS, "halo_sm90") and "tf32x3, nchw" in text
        assert set(families_of(export(path, arch="sm_90a", precision="ieee")).values()) == {"direct"}
        assert set(families_of(export(path, arch="sm_80")).values()) == {"direct"}
