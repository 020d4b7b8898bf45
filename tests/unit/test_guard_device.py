"""Refusals by GPU and installation."""

from sgl_lowlatency.guard import device

FULL = {"emulation": ["host"], "cuda": ["sm_90a", "sm_100a"]}


def test_compiled_isa_is_served():
    assert device.backend_reasons("sm_90", FULL, emulate=False) == []


def test_known_isa_that_was_not_compiled_says_how_to_get_it():
    (reason,) = device.backend_reasons("sm_103", FULL, emulate=False)
    assert reason.startswith("this installation has kernels for sm_90a, sm_100a, not for sm_103: reinstall")


def test_unknown_isa_promises_nothing():
    (reason,) = device.backend_reasons("sm_120", FULL, emulate=False)
    assert reason == "this installation has kernels for sm_90a, sm_100a, not for sm_120"


def test_host_only_build_serves_emulation_alone():
    host_only = {"emulation": ["host"]}
    assert device.backend_reasons("sm_90", host_only, emulate=True) == []
    assert "built without nvcc" in device.backend_reasons("sm_90", host_only, emulate=False)[0]


def test_an_extension_that_does_not_load_is_a_reason(monkeypatch):
    def broken():
        raise ImportError("undefined symbol")

    monkeypatch.setattr(device, "compiled_backends", broken)
    assert device.installation_reasons("sm_90", emulate=False) == ["undefined symbol"]
