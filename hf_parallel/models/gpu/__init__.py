"""Forward passes on a GPU whose results do not depend on the schedule."""
