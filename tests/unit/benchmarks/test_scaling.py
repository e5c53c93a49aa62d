"""The overhead of a job grows linearly with its processes, counted by running the launcher's code."""

import pytest

from benchmarks import scaling, scaling_data

TASKS = 2


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Number of nodes -> counts."""
    return {nodes: scaling.counts(nodes, TASKS) for nodes in (8, 16)}


@pytest.mark.second
def test_requests_to_the_store_grow_linearly_with_the_processes(found):
    # Requests of the other ranks in a stall depend on their waiting time; a test below bounds them.
    for name in ("preflight: keys asked of the store", "watchdog: keys that one rank asks for in a stall"):
        assert found[16][name] <= 2.2 * found[8][name], name


def test_a_node_prints_one_line_for_its_report_and_one_per_all_reduce():
    counts = scaling.preflight_counts(16, TASKS)
    assert counts["preflight: lines"] == 16 * (1 + 4)


def test_lines_are_short_enough_for_srun_so_no_healthy_node_is_excluded():
    # With names of 8 letters, the names of 128 nodes are longer than a line that srun keeps whole.
    counts = scaling.preflight_counts(128, TASKS)
    assert counts["preflight: most bytes of a task"] <= scaling.MESSAGE_BYTES
    excluded = [count for name, count in counts.items() if "excluded" in name]
    assert len(excluded) > 2
    assert not any(excluded)


@pytest.mark.second
def test_one_process_diagnoses_a_stall_for_all(found):
    for nodes, ranks in ((8, 8 * TASKS), (16, 16 * TASKS)):
        # It reads each rank's reports twice; the others poll for the answer.
        assert 4 * ranks < found[nodes]["watchdog: keys that one rank asks for in a stall"] < 4 * ranks + 40
        assert found[nodes]["watchdog: keys that each other rank asks for"] < 40
        assert found[nodes]["watchdog: different explanations"] == 1


def test_the_rate_of_messages_to_the_store_is_limited():
    assert scaling.messages_a_second(8) == 8
    assert scaling.messages_a_second(8192) <= 2048


def test_each_rank_flushes_its_own_files(found):
    for counts in found.values():
        assert counts["save: most files flushed by another rank"] == 1
        assert counts["save: files and folders flushed by rank 0"] < 8


def test_a_rank_receives_the_manifest_once(found):
    received = {nodes: found[nodes]["manifest: bytes that a rank receives of it"] for nodes in found}
    # The manifest names one file per rank.
    assert received[16] <= 2.2 * received[8]


def test_one_failure_is_recorded_as_one_event(found):
    assert found[16]["failure: events that one cause leaves"] == 1


def test_no_more_groups_are_built_for_more_ranks(found):
    smaller, larger = (
        {name: count for name, count in counts.items() if name.startswith("start:")}
        for counts in (found[16], scaling.group_counts(64, TASKS))
    )
    assert smaller == larger
    # tp, gradient and, in one of one rank, the other axes; with stages also pp and model
    assert list(larger.values()) == [3, 4, 5, 6]


@pytest.mark.second
def test_a_rank_draws_no_more_than_its_layers_of_the_initial_weights(found):
    name = "initial weights: percent that a process draws at most"
    # 33 drawn layers, on 16 and 32 ranks
    assert found[16][name] < found[8][name] < 100 / 8


@pytest.mark.second
def test_a_save_asks_for_each_file_a_few_times_however_many_there_are(found):
    names = [name for name in found[8] if "for a file of a rank" in name]
    assert len(names) == 2
    for name in names:
        assert found[16][name] <= found[8][name] < 12, name


@pytest.mark.second
def test_a_corpus_more_costs_the_same_in_any_blend(tmp_path):
    fewer, more = (
        {
            name.partition(", ")[2]: count
            for name, count in scaling_data.blend_counts(tmp_path / str(n), n).items()
        }
        for n in (20, 40)
    )
    for start in ("first start", "later start"):
        name = f"{start}: file operations on indices, for a corpus"
        assert more[name] <= 1.05 * fewer[name]


@pytest.mark.second
def test_a_merge_opens_no_more_files_and_loads_no_more_tokenizers_for_more_folders(tmp_path):
    counts = scaling_data.merge_counts(tmp_path, 20)
    assert 20 * counts["merge: tokenizers that are loaded, for a folder"] == 1
    assert 20 * counts["merge: files that are open at most, for a folder"] < 10
    assert counts["merge: bytes of tokens that are read again, for each"] == 0


def test_a_part_of_a_source_reads_each_file_once_and_the_others_heads(tmp_path):
    counts = scaling_data.part_counts(tmp_path / "texts", 4)
    assert counts["prepare --part I/4: most opened files, for a file of the source"] <= 1 + 2 / 4
