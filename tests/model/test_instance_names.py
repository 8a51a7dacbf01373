"""Short forms of instances' names."""

from lineshaft.model.instance_names import short_names

BOOT, OTHER_BOOT = "a373a382-05c2-4a85-a2a4-15d68e52596e", "b373a382-05c2-4a85-a2a4-15d68e52596e"


def test_names_are_shortened_to_host_and_process_id_unless_that_is_ambiguous() -> None:
    one, two = f"web/1/{BOOT}/4026531836/300/653898/1", f"web/1/{BOOT}/4026531836/300/653898/2"
    before, after = f"db/{BOOT}/4026531836/7/1/1", f"db/{OTHER_BOOT}/4026531836/7/1/1"

    assert short_names([one, two]) == ["web/1 pid 300", "web/1 pid 300 no. 2"]
    assert short_names([before, after]) == [before, after]
    assert short_names(["writer-x2x4z", "", "a/b/c"]) == ["writer-x2x4z", "", "a/b/c"]
