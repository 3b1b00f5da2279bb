"""The local tier: steps in folders of the processes' hosts, with copies in other failure domains."""
