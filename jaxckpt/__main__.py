"""`python -m jaxckpt`."""

from jaxckpt._cli import main

if __name__ == "__main__":
    main(prog_name="jaxckpt")
