"""Two servers that cannot be compared are refused with every reason. Oracle: chosen answers of stand-in servers."""

import pytest
from stub_server import OURS, stub

from benchmark.agentic import arms
from benchmark.agentic.arms import ArmsRefused
from benchmark.serve.server import free_port

ACTIVE = {"enable_nvidia_megakernel": True, "port": 2, "startup_time": 9}


def refusal(off, on):
    with pytest.raises(ArmsRefused) as refused:
        arms.told(arms.account_of(arms.attach("off", off.url)), arms.account_of(arms.attach("on", on.url)))
    return str(refused.value).splitlines()


def test_servers_that_differ_in_the_plugin_alone_are_accepted():
    with stub() as off, stub(ACTIVE, OURS) as on:
        pair = [arms.account_of(arms.attach(name, one.url)) for name, one in (("off", off), ("on", on))]
        assert arms.told(*pair) == {
            "arguments": {name: {"version": "0.5.23", "context_length": 2048}.get(name) for name in arms.TOLD}, "startup": [], "attached": True,
        }


def test_other_models_and_arguments_are_named():
    with stub() as off, stub(ACTIVE | {"model_path": "n", "context_length": 4096, "version": "0.6"}, OURS) as on:
        assert refusal(off, on) == [
            "different models on the arms: m off, n on", "different SGLang on the arms: 0.5.23 off, 0.6 on",
            "different context_length on the arms: 2048 off, 4096 on",
        ]


def test_a_plugin_that_is_not_active_is_named():
    with stub() as off, stub() as on:
        assert refusal(off, on) == ["plugin not active: the on server was started without --enable-nvidia-megakernel"]
    with stub() as off, stub(ACTIVE) as on:  # the flag is set and nothing of ours runs
        assert refusal(off, on) == ["plugin not active: the on server exports no sgl_lowlatency counters"]


def test_a_plugin_on_the_off_arm_is_named():
    with stub(ACTIVE, OURS) as off, stub(ACTIVE, OURS) as on:
        assert refusal(off, on) == [
            "the off server has the plugin's flag, --enable-nvidia-megakernel",
            "the off server exports sgl_lowlatency counters: the plugin runs there",
        ]


def test_servers_that_cannot_be_reached_or_asked_are_named():
    port = free_port()
    with pytest.raises(ArmsRefused, match=f"on: no server answers at http://127.0.0.1:{port}: "):
        arms.attach("on", f"http://127.0.0.1:{port}").info()
    with stub(metrics=None) as server, pytest.raises(ArmsRefused, match="/metrics answers 404; start it with --enable-metrics"):
        arms.attach("off", server.url).counts()


@pytest.mark.parametrize("url", ["127.0.0.1:30000", "https://127.0.0.1:30000", "http://127.0.0.1", "http://127.0.0.1:x", "http://127.0.0.1:3/v1"])
def test_addresses_of_another_form_are_refused(url):
    with pytest.raises(ArmsRefused, match="is not of the form http://127.0.0.1:PORT"):
        arms.attach("off", url)


def test_servers_of_other_hosts_are_refused():
    with pytest.raises(ArmsRefused, match="only servers of this host"):
        arms.attach("off", "http://gpu7:30000")
