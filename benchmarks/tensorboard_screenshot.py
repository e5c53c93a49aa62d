"""The picture in docs/monitoring.md: TensorBoard on some runs, as headless Chromium shows it.

python -m benchmarks.tensorboard_screenshot --root runs --out docs/images/tensorboard.png

Takes Chromium alone (`apt-get install chromium`, or --browser), and no driver of it.
"""

import argparse
import subprocess
import tempfile
from pathlib import Path

from launch.monitor import start_tensorboard


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, default=Path("runs"), help="folder of runs")
    parser.add_argument("--out", type=Path, default=Path("docs/images/tensorboard.png"))
    parser.add_argument("--page", default="custom_scalars", help="TensorBoard's name of the page")
    parser.add_argument("--browser", default="chromium")
    parser.add_argument("--size", default="1400,900", help="of the window, pixels")
    parser.add_argument("--seconds", type=int, default=30, help="given to the page to draw itself")
    args = parser.parse_args()
    address = start_tensorboard(args.root, [], "localhost", 0)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as profile:
        command = [
            args.browser,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--no-proxy-server",
            f"--user-data-dir={profile}",
            f"--window-size={args.size}",
            f"--virtual-time-budget={args.seconds * 1000}",
            f"--screenshot={args.out.absolute()}",
            f"{address}#{args.page}",
        ]
        subprocess.run(command, check=True, timeout=300)
    print(f"{args.out}: {args.out.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
