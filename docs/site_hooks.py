"""What the site needs besides docs/: pages from other places, and links to files of the repository.

On GitHub a page links to `../README.md` or `../launch/tpu.sh`. On the site the first is a page, the
second an address in the repository; a link to a file that is not there stops the strict build.
"""

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
# Files outside docs/ that are pages of the site: where they are, and what the page is called.
PAGES = {
    "README.md": "readme.md",
    "specjax/pairs/multi30k_ende/README.md": "pair_multi30k_ende.md",
    "specjax/pairs/gsm8k/README.md": "pair_gsm8k.md",
}
# [text](target), not of a page with a scheme and not of a place in the same page.
LINK = re.compile(r"(\]\()(?![a-z]+:|#)([^)\s]+)(\))")
FENCE = re.compile(r"^( *```.*?^ *```$)", re.M | re.S)


def on_files(files, config):
    """Adds the pages that lie outside docs/."""
    for source, name in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    """Turns links to files of the repository into those of the site."""
    place = page.file.src_uri
    sources = {name: source for source, name in PAGES.items()}
    source = sources.get(place, f"docs/{place}")

    def target(match):
        return match[1] + site_link(match[2], source, place, config["repo_url"]) + match[3]

    parts = FENCE.split(markdown)
    return "".join(
        part if part.startswith(("```", " ")) and FENCE.fullmatch(part) else LINK.sub(target, part)
        for part in parts
    )


def site_link(link, source, place, repository):
    """A link of the file `source`, as it must be in the page `place`."""
    path, hash_, anchor = link.partition("#")
    meant = normpath(PurePosixPath(source).parent / path)
    if not (ROOT / meant).exists():
        raise PluginError(f"{source}: the link to {link} leads to {meant}, which is not there")
    if meant in PAGES:
        found = PAGES[meant]
    elif meant.startswith("docs/") and not meant.endswith(".py"):
        found = meant.removeprefix("docs/")
    else:
        kind = "tree" if (ROOT / meant).is_dir() else "blob"
        return f"{repository}/{kind}/main/{meant}{hash_}{anchor}"
    return relpath(found, str(PurePosixPath(place).parent)) + hash_ + anchor
