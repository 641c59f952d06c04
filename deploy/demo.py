"""Asks the demo's questions through the command line and prints one table of what each strategy cost.

    demo.py ask PROGRAM SERVER QUESTIONS.jsonl ANSWERS.jsonl     asks, prints answers as they come, keeps the receipts
    demo.py table ANSWERS.jsonl                                  prints the table (medians over the questions)
"""
import json
import statistics
import subprocess
import sys

# `full` first, so that `clip` is compared with something; the first round is a warm-up and not shown.
STRATEGIES = ["full", "clip"]
TOP_K = "16"
MAX_TOKENS = "32"


def ask(program, server, strategy, question, show):
    """Runs one `kvsplice ask` and returns its last event."""
    command = [program, "ask", "--server", server, "--corpus", "demo", "--top-k", TOP_K, "--strategy", strategy]
    command += ["--max-tokens", MAX_TOKENS, "--json", question]
    last = None
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            event = json.loads(line)
            if show and event.get("event") == "delta":
                print(event["text"], end="", flush=True)
            if event.get("event") == "done":
                last = event
    if process.returncode != 0 or last is None:
        sys.exit(process.returncode or 70)
    return last


def ask_all(program, server, questions, answers):
    with open(questions, encoding="utf-8") as source:
        asked = [json.loads(line) for line in source if line.strip()]
    print("demo: warming up")
    for strategy in STRATEGIES:
        ask(program, server, strategy, asked[0]["question"], show=False)
    with open(answers, "w", encoding="utf-8") as sink:
        for entry in asked:
            print(f"\nQuestion: {entry['question']}\n(expected: {entry['answer']})")
            for strategy in STRATEGIES:
                print(f"{strategy:>6}: ", end="", flush=True)
                done = ask(program, server, strategy, entry["question"], show=True)
                print()
                sink.write(json.dumps({"strategy": strategy, "done": done}) + "\n")


def duration(receipt, match):
    """Milliseconds from the first start to the last end of the spans whose name `match` accepts."""
    spans = [span for span in receipt["spans"] if match(span["stage"])]
    if not spans:
        return 0.0
    return max(span["end_ms"] for span in spans) - min(span["start_ms"] for span in spans)


def table(answers):
    rows = {}
    with open(answers, encoding="utf-8") as source:
        for line in source:
            entry = json.loads(line)
            receipt = entry["done"]["receipt"]
            tokens = receipt["tokens"]
            rows.setdefault(entry["strategy"], []).append({
                "ratio": receipt["ratio_charged"],
                "ttft": entry["done"]["ttft_ms"],
                "score": duration(receipt, lambda stage: stage in ("score", "select")),
                "load": duration(receipt, lambda stage: stage == "load"),
                "recompute": duration(receipt, lambda stage: stage.startswith("rows.")),
                "reused": tokens["reused_exact"] + tokens["reused_approximate"],
                "recomputed": tokens["recomputed"],
            })
    medians = {
        strategy: {key: statistics.median(row[key] for row in measured) for key in measured[0]}
        for strategy, measured in rows.items()
    }
    header = ["strategy", "ratio", "TTFT ms", "score ms", "load ms", "recompute ms", "reused", "recomputed", "speed-up"]
    lines = [header]
    for strategy, row in medians.items():
        speed_up = medians["full"]["ttft"] / row["ttft"] if row["ttft"] > 0 else 0.0
        lines.append([
            strategy, f"{row['ratio']:.2f}", f"{row['ttft']:.0f}", f"{row['score']:.0f}", f"{row['load']:.0f}",
            f"{row['recompute']:.0f}", f"{row['reused']:.0f}", f"{row['recomputed']:.0f}", f"{speed_up:.2f}x",
        ])
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    print(f"\nMedians over {len(next(iter(rows.values())))} questions; scoring, loading and recomputing overlap.")
    for line in lines:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths)))
    print("Tokens are prompt tokens. One round on this machine; for measurements use: kvsplice bench ttft")


def main():
    if len(sys.argv) == 6 and sys.argv[1] == "ask":
        ask_all(*sys.argv[2:])
    elif len(sys.argv) == 3 and sys.argv[1] == "table":
        table(sys.argv[2])
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
