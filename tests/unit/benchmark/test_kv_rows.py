"""KV rows and Engram's tokens behind a step of ours and of SGLang's: what is compared, what is a problem."""

from types import SimpleNamespace

import attention_in_cases
import pytest
import torch

from benchmark.kernels import kv_rows

SIZE = 32  # slots of a page
BYTES = 576


def pool(*layers):
    return SimpleNamespace(
        get_swa_key_buffer_radix=lambda i: layers[i], get_swa_key_page_size=lambda: SIZE, translate_loc_from_full_to_swa=lambda slots: slots + 2
    )


class Runner:
    """A pool of one layer, and tokens that Engram keeps."""

    def __init__(self, history=(1, 2)):
        self.cache = attention_in_cases.empty_cache("cpu")
        self.token_to_kv_pool = pool(self.cache.pages)
        hasher = None if history is None else SimpleNamespace(history=torch.tensor(history))
        self.model = SimpleNamespace(model=SimpleNamespace(engram_hasher=hasher))

    def write(self, slot, value, scale=127):
        page, at = divmod(slot, SIZE)
        self.cache.pages[page, at * BYTES : (at + 1) * BYTES] = value
        self.cache.pages[page, SIZE * BYTES + at * 8 : SIZE * BYTES + (at + 1) * 8] = scale
        return self

    def state(self):
        return kv_rows.state_of(self, [0])


def test_rows_of_the_same_slots_are_compared():
    before, ours, theirs = Runner().state(), Runner().write(5, 8).write(70, 8).state(), Runner().write(5, 8).write(70, 8)
    assert kv_rows.written_slots(before.keys[0], ours.keys[0]).tolist() == [5, 70]
    assert kv_rows.compared(before, ours, theirs.state(), 2) == ([0.0], [])
    (far,), problems = kv_rows.compared(before, ours, theirs.write(5, 16).state(), 2)
    assert 0.1 < far < 10 and problems == []


def test_a_row_that_is_there_already_counts_as_written():
    runner = Runner().write(5, 8).write(6, 9)
    kept = runner.state()
    kv_rows.invert(runner, [0], SimpleNamespace(out_cache_loc=torch.tensor([3])))
    before = runner.state()
    assert kv_rows.written_slots(kept.keys[0], before.keys[0]).tolist() == [5]
    assert kv_rows.compared(before, before, kept, 1)[1] == ["layer 0: keys of slots [] were written, SGLang writes [5], of 1 rows"]
    assert kv_rows.compared(before, runner.write(5, 8).state(), kept, 1) == ([0.0], [])


def test_a_scale_alone_makes_a_slot_written():
    before, runner = Runner().state(), Runner()
    runner.cache.pages[1, SIZE * BYTES + 3 * 8] = 1
    assert kv_rows.written_slots(before.keys[0], runner.state().keys[0]).tolist() == [SIZE + 3]


@pytest.mark.parametrize("slots", [(6,), (5, 6), ()])
def test_other_slots_are_a_problem(slots):
    ours, before = Runner(), Runner().state()
    for slot in slots:
        ours.write(slot, 8)
    distances, problems = kv_rows.compared(before, ours.state(), Runner().write(5, 8).state(), 1)
    assert distances == [] and problems == [f"layer 0: keys of slots {list(slots)} were written, SGLang writes [5], of 1 rows"]


def test_fewer_slots_than_rows_are_a_problem():
    state = Runner().write(5, 8).state()
    assert kv_rows.compared(Runner().state(), state, state, 2)[1] == ["layer 0: keys of slots [5] were written, SGLang writes [5], of 2 rows"]


def test_other_tokens_are_a_problem():
    before = Runner().state()
    ours, theirs = Runner((1, 3)).write(5, 8).state(), Runner().write(5, 8).state()
    assert kv_rows.compared(before, ours, theirs, 1)[1] == ["the tokens that Engram layers hash are not SGLang's behind the step"]
    assert kv_rows.compared(Runner(None).state(), Runner(None).write(5, 8).state(), Runner(None).write(5, 8).state(), 1) == ([0.0], [])
