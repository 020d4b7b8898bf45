"""Traces that aiperf would refuse are refused here, by name. Oracle: the schema of aiperf 0.13.0's Weka models, restated as cases."""

import json

import pytest

from benchmark.traces import schema
from benchmark.traces.schema import TraceError

REQUEST = {"t": 0.0, "type": "n", "model": "m", "in": 130, "out": 5, "hash_ids": [1, 2], "stop": "", "api_time": None, "think_time": 1.5}
SUBAGENT = {"t": 1.0, "type": "subagent", "agent_id": "a", "subagent_type": "Explore", "status": "completed", "models": ["m"], "requests": [REQUEST]}
TRACE = {"id": "one", "models": ["m"], "block_size": 64, "hash_id_scope": "local", "tool_tokens": 64, "system_tokens": 10, "totals": None}


def written(tmp_path, requests, **changes):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(TRACE | {"requests": requests} | changes))
    return path


def test_a_session_with_a_subagent_is_read(tmp_path):
    (trace,) = schema.read(written(tmp_path, [REQUEST, SUBAGENT, REQUEST | {"type": "s", "ttft": 0.1, "in": 900, "out": 7}]))
    assert [(name, [r.input_tokens for r in requests]) for name, requests in trace.streams] == [("root", [130, 900]), ("a#0", [130])]
    assert (trace.id, trace.prefix_tokens, trace.peak_tokens) == ("one", 74, 907)
    assert trace.root[0].hash_ids == (1, 2) and trace.root[0].think_s == 1.5
    assert len(trace.sha256) == 64


@pytest.mark.parametrize(
    ("requests", "changes", "words"),
    [
        ([REQUEST | {"colour": 1}], {}, r"trace.json: requests\[0\]: unknown key 'colour'; known are t, type, "),
        ([REQUEST | {"ttft": 0.1}], {}, r"requests\[0\]: unknown key 'ttft'"),  # of streaming requests only
        ([SUBAGENT | {"requests": [REQUEST | {"x": 1}]}, REQUEST], {}, r"requests\[0\]: requests\[0\]: unknown key 'x'"),
        ([SUBAGENT | {"depth": 1}, REQUEST], {}, r"requests\[0\]: unknown key 'depth'"),
        ([REQUEST], {"version": 2}, "trace.json: unknown key 'version'"),
        ([{k: v for k, v in REQUEST.items() if k != "out"}], {}, r"requests\[0\]: key 'out' is missing"),
        ([REQUEST | {"in": "130"}], {}, r"requests\[0\]: in is not an integer"),
        ([REQUEST | {"hash_ids": [1, None]}], {}, "hash_ids is not a list of integers"),
        ([REQUEST | {"in": True}], {}, "in is not an integer"),
        ([REQUEST | {"type": "stream"}], {}, "type is 'stream', not one of n, s, subagent"),
        ([SUBAGENT | {"requests": [SUBAGENT]}, REQUEST], {}, "type is 'subagent', not one of n, s"),
        ([REQUEST | {"out": 0}], {}, "in is 130 and out 0, both must be 1 or more"),
        ([REQUEST | {"hash_ids": [1, 2, 3, 4]}], {}, "4 hash_ids of 64 tokens are more than in, 130 tokens"),
        ([REQUEST], {"hash_id_scope": "global"}, "hash_id_scope is 'global', only 'local' is read"),
        ([SUBAGENT], {}, "no request of type 'n' or 's'"),
    ],
)
def test_what_cannot_be_replayed_is_refused_by_name(tmp_path, requests, changes, words):
    with pytest.raises(TraceError, match=words):
        schema.read(written(tmp_path, requests, **changes))


def test_files_are_refused_by_name(tmp_path):
    with pytest.raises(TraceError, match="no such file or folder"):
        schema.read(tmp_path / "absent")
    with pytest.raises(TraceError, match="the folder has no .json file"):
        schema.read(tmp_path)
    written(tmp_path, [REQUEST])
    (tmp_path / "zweite.json").write_text((tmp_path / "trace.json").read_text())
    with pytest.raises(TraceError, match="zweite.json: id 'one' is also that of trace.json"):
        schema.read(tmp_path)
    (tmp_path / "zweite.json").write_text("{")
    with pytest.raises(TraceError, match="zweite.json: not JSON"):
        schema.read(tmp_path)


def test_the_digest_names_content_and_order(tmp_path):
    (one,) = schema.read(written(tmp_path, [REQUEST]))
    (other,) = schema.read(written(tmp_path, [REQUEST | {"out": 6}]))
    assert schema.digest([one]) != schema.digest([other])
    assert schema.digest([one, other]) != schema.digest([other, one])
