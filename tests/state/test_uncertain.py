"""Lists of uncertain elements."""

from superadam.state.uncertain import LISTED_SHARE, empty_lists


def test_a_list_is_complete_up_to_its_last_entry() -> None:
    (listed,) = empty_lists([LISTED_SHARE * 16], [False])
    for count, is_complete in ((0, True), (15, True), (16, True), (17, False), (400, False)):
        listed.records["count"] = count
        assert (listed.count, listed.is_complete) == (count, is_complete)
