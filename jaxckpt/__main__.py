"""`python -m jaxckpt`."""

from jaxckpt._cli.main import main

if __name__ == "__main__":
    main(prog_name="jaxckpt")
