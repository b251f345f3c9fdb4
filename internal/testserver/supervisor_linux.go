package testserver

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"syscall"
)

// supervisorName is the name under which this executable starts itself as a supervisor. Killing a server's first process
// is not enough: RabbitMQ's is a shell, PostgreSQL's processes leave its process group. The supervisor adopts whatever
// loses its parent, so that it can kill all.
const supervisorName = "inbox-test-supervisor"

const prSetChildSubreaper = 36

func init() {
	if os.Args[0] == supervisorName {
		os.Exit(supervise(os.Args[1], os.Args[2], os.Args[3], os.Args[4:]))
	}
}

// supervised returns the supervisor of a command whose data are in dir.
func supervised(dir string, owner *owner, command []string) (*exec.Cmd, error) {
	executable, err := os.Executable()
	if err != nil {
		return nil, err
	}
	uid, gid := "", ""
	if owner != nil {
		uid, gid = strconv.Itoa(owner.uid), strconv.Itoa(owner.gid)
	}
	cmd := exec.Command(executable, append([]string{dir, uid, gid}, command...)...) //nolint:gosec,noctx // itself; ended by kill
	cmd.Args[0] = supervisorName
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // out of reach of the terminal's Ctrl-C
	return cmd, nil
}

// supervise runs a command until it ends or is told to. Each byte on standard input is a signal for it; SIGKILL ends
// all of its processes. The end of the input means that the starting process is gone: then its folder goes too.
func supervise(dir, uid, gid string, command []string) int {
	runtime.LockOSThread() // the kernel takes the end of the starting thread for the parent's
	if _, _, errno := syscall.RawSyscall(syscall.SYS_PRCTL, prSetChildSubreaper, 1, 0); errno != 0 {
		fmt.Fprintln(os.Stderr, "become a subreaper:", errno)
		return 1
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	attr := &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if uid != "" {
		attr.Credential = &syscall.Credential{Uid: number(uid), Gid: number(gid)}
	}
	child, err := syscall.ForkExec(command[0], command, &syscall.ProcAttr{
		Env: os.Environ(), Files: []uintptr{null.Fd(), 1, 2}, Sys: attr,
	})
	if err != nil {
		fmt.Fprintf(os.Stderr, "%s: %s\n", command[0], err)
		return 1
	}
	orphaned := make(chan struct{})
	go func() {
		for order := make([]byte, 1); ; {
			n, err := os.Stdin.Read(order)
			switch {
			case n == 0 && err != nil:
				close(orphaned)
				killDescendants()
				return
			case syscall.Signal(order[0]) == syscall.SIGKILL:
				killDescendants()
			default:
				_ = syscall.Kill(child, syscall.Signal(order[0]))
			}
		}
	}()

	code := 1
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, 0, nil)
		switch {
		case err == syscall.ECHILD: //nolint:errorlint // never wrapped
			select {
			case <-orphaned:
				_ = os.RemoveAll(dir)
			default:
			}
			return code
		case pid == child:
			if status.Exited() {
				code = status.ExitStatus()
			}
			killDescendants() // what it left behind
		}
	}
}

// Terminate asks a process and all processes below it to end.
func Terminate(pid int) {
	// They are stopped first, so that none starts another one unseen.
	stopped := map[int]bool{}
	for found := true; found; {
		found = false
		for _, p := range append(descendants(pid), pid) {
			if !stopped[p] {
				_ = syscall.Kill(p, syscall.SIGSTOP)
				stopped[p], found = true, true
			}
		}
	}
	for p := range stopped {
		_ = syscall.Kill(p, syscall.SIGTERM)
		_ = syscall.Kill(p, syscall.SIGCONT)
	}
}

// killDescendants kills all processes below this one, until there are none.
func killDescendants() {
	for {
		below := descendants(os.Getpid())
		if len(below) == 0 {
			return
		}
		for _, pid := range below {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
		runtime.Gosched()
	}
}

// descendants returns the living processes below root.
func descendants(root int) []int {
	children := map[int][]int{}
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, path := range stats {
		stat, err := os.ReadFile(path) //nolint:gosec // of the kernel
		if err != nil {
			continue // it ended
		}
		// "pid (name) state parent …", where the name may hold anything.
		fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
		if len(fields) < 2 || fields[0][0] == 'Z' {
			continue
		}
		pid, errPID := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		parent, errParent := strconv.Atoi(string(fields[1]))
		if errPID == nil && errParent == nil {
			children[parent] = append(children[parent], pid)
		}
	}
	var found []int
	for queue := children[root]; len(queue) > 0; queue = queue[1:] {
		found = append(found, queue[0])
		queue = append(queue, children[queue[0]]...)
	}
	return found
}

func number(text string) uint32 {
	n, _ := strconv.ParseUint(text, 10, 32)
	return uint32(n)
}
