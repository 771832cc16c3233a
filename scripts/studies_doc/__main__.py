"""Writes docs/studies from the studies and from what was measured: python -m scripts.studies_doc."""

from scripts.studies_doc.pages import all_pages

if __name__ == "__main__":
    for path, text in all_pages().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
