"""Write the page and figure of `grow_on_skill`."""

from matplotlib.figure import Figure


def page_of(frames, about, flag):
    return "# page\n" + "\n".join(f.to_string() for f in frames.values())


def figure(frames):
    return Figure()
