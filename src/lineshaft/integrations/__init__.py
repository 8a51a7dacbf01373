"""Ways to the outside, for who uses them: chosen by settings, imported where they are chosen."""
