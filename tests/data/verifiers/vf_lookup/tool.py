"""The tool, which verifiers serves from a process of its own."""

import verifiers.v1 as vf


class LookupToolset(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "house"

    @vf.tool
    def find(self, thing: str) -> str:
        """Say where a thing is.

        Args:
            thing: what to look for.
        """
        return f"The {thing} is in the attic."


if __name__ == "__main__":
    LookupToolset.run()
