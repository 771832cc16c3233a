"""Photographs a page in a browser without a screen: python photograph.py PAGE FRAGMENT PICTURE WIDTH HEIGHT.

Run by `pictures.py` with the Python of an environment with PySide6; it imports nothing else. The picture is light
even on a dark desktop.
"""

import os
import sys
from pathlib import Path

os.environ["QT_QPA_PLATFORM"] = "offscreen"
os.environ["QTWEBENGINE_CHROMIUM_FLAGS"] = "--no-sandbox --disable-gpu --hide-scrollbars"

from PySide6.QtCore import Qt, QTimer, QUrl
from PySide6.QtWebEngineCore import QWebEngineSettings
from PySide6.QtWebEngineWidgets import QWebEngineView
from PySide6.QtWidgets import QApplication

DRAWING_MS = 1500  # drawing ends later than loading


def photograph(page: Path, fragment: str, picture: Path, width: int, height: int) -> None:
    """Show a page at a fragment, and save a picture of the window.

    Raises: RuntimeError if the page cannot be loaded or the picture cannot be written.
    """
    application = QApplication([])
    application.styleHints().setColorScheme(Qt.ColorScheme.Light)
    view = QWebEngineView()
    view.settings().setAttribute(QWebEngineSettings.WebAttribute.ShowScrollBars, False)
    view.resize(width, height)
    view.show()
    problems = []

    def keep() -> None:
        if not view.grab().save(str(picture)):
            problems.append(f"{picture} cannot be written")
        application.quit()

    def wait(is_loaded: bool) -> None:
        if not is_loaded:
            problems.append(f"{page} cannot be loaded")
        QTimer.singleShot(DRAWING_MS, keep)

    view.loadFinished.connect(wait)
    address = QUrl.fromLocalFile(str(page.resolve()))
    address.setFragment(fragment)
    view.load(address)
    application.exec()
    if problems:
        raise RuntimeError("; ".join(problems))


if __name__ == "__main__":
    photograph(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
