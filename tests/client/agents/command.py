"""A command that does what its task says, to end in every way that a process can."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

task = json.load(sys.stdin)
match task["do"]:
    case "print":
        for line in task["lines"]:
            print(line)
    case "bytes":
        sys.stdout.buffer.write(bytes.fromhex(task["hex"]) * task.get("times", 1))
        if "then" in task:
            print(task["then"])
    case "large result":
        print(json.dumps({"progress": "half"}))
        print(json.dumps({"said": task["n"], "text": "x" * task["bytes"]}))
    case "environment":
        print(json.dumps({name: value for name, value in os.environ.items() if name.startswith(task["prefix"])}))
    case "folder":
        print(json.dumps([str(Path.cwd()), sys.argv[1:]]))
    case "fail":
        print("it was not to be", file=sys.stderr)
        sys.exit(3)
    case "signal":
        print("going", file=sys.stderr)
        os.kill(os.getpid(), signal.SIGSEGV)
    case "spew":
        sys.stdout.write("begin\n" + "x" * 99 + "\n")
        for _ in range(task["lines"]):
            sys.stdout.write("y" * 99 + "\n")
        print(1.0)
    case "leave children":
        children = [subprocess.Popen(["sleep", "600"])]  # holds the pipes, too
        children.append(subprocess.Popen(["sleep", "600"], start_new_session=True))
        children.append(subprocess.Popen(["/bin/sleep", "600"], start_new_session=True, env={}))
        nested = "import subprocess; subprocess.run(['sleep', '600'])"
        children.append(subprocess.Popen([sys.executable, "-c", nested], start_new_session=True))
        whole = Path(task["file"] + ".new")
        whole.write_text(json.dumps([child.pid for child in children]))
        whole.rename(task["file"])
        if task.get("kill parent"):
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(600)
        if task["hang"]:
            if task.get("stubborn"):
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            print("hanging", flush=True)
            time.sleep(600)
        print(1.0)
    case "memory":
        hoard = bytearray(task["mb"] << 20)
        print(1.0)
    case "memory of children":
        script = f"hoard = bytearray(b'x') * ({task['mb']} << 20); input()"
        children = [subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) for _ in range(task["n"])]
        for child in children:
            child.wait()
    case "memory shared with children":
        hoard = bytearray(b"x") * (task["mb"] << 20)
        forked = [os.fork() or (time.sleep(3), os._exit(0)) for _ in range(task["n"])]
        for pid in forked:
            os.waitpid(pid, 0)
        print(1.0)
    case "burn":
        while True:
            pass
    case unknown:
        raise NotImplementedError(unknown)
