package wireproxy

import (
	"fmt"
	"strings"
	"sync"
)

// Kind is what happens at the message that a [Fault] selects.
type Kind int

const (
	// CutBefore closes the connection instead of passing the message on: a request, or a reply, is lost.
	CutBefore Kind = iota + 1

	// CutAfter passes the message on and closes the connection. The server has executed a client's message by the time
	// that the client sees the end, but the reply does not reach the client: a reply is lost. After a server's message
	// the client finds the connection dead when it uses it next.
	CutAfter

	// Stall holds the message and everything after it, in both directions of that connection, until [Trap.Release] or
	// until the client closes the connection, upon which what was held is lost.
	Stall

	// Drop loses the message; the connection goes on.
	Drop
)

// String names the kind, for failure messages and names of subtests.
func (k Kind) String() string {
	switch k {
	case CutBefore:
		return "CutBefore"
	case CutAfter:
		return "CutAfter"
	case Stall:
		return "Stall"
	case Drop:
		return "Drop"
	default:
		return fmt.Sprintf("Kind(%d)", int(k))
	}
}

// Fault happens once, at one message.
//
// Both cuts end the server's side first, so that the server has processed whatever it was sent, and has rolled back, before
// the client learns of the cut. The encryption requests that the proxy itself answers are never selected.
type Fault struct {
	// Kind is what happens.
	Kind Kind

	// From selects the messages of one direction. Defaults to both.
	From Direction

	// Match selects messages further. It runs under the proxy's lock. Defaults to all.
	Match func(Message) bool

	// N is which of the selected messages it is, counted from 1 over all connections once the fault is armed. Defaults
	// to the first.
	N int
}

// Statement returns a [Fault].Match for the messages at which the server executes a statement that begins with the prefix,
// in any case: Query and Execute, COM_QUERY and COM_STMT_EXECUTE.
func Statement(prefix string) func(Message) bool {
	return func(m Message) bool {
		switch m.Name {
		case "Query", "Execute", "COM_QUERY", "COM_STMT_EXECUTE":
			text := strings.TrimSpace(m.Text)
			return len(text) >= len(prefix) && strings.EqualFold(text[:len(prefix)], prefix)
		default:
			return false
		}
	}
}

// Trap is an armed [Fault].
type Trap struct {
	proxy    *Proxy
	fault    Fault
	seen     int // guarded by the proxy's lock, as is message
	message  Message
	fired    chan struct{}
	released chan struct{}
	release  sync.Once
}

// Arm sets the fault, in place of one armed before.
func (p *Proxy) Arm(fault Fault) *Trap {
	if fault.Kind < CutBefore || fault.Kind > Drop || fault.N < 0 {
		panic(fmt.Sprintf("wireproxy: invalid fault %+v", fault))
	}
	fault.N = max(fault.N, 1)
	t := &Trap{proxy: p, fault: fault, fired: make(chan struct{}), released: make(chan struct{})}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.trap = t
	return t
}

// Fired returns the message at which the fault happened, and whether it did.
func (t *Trap) Fired() (Message, bool) {
	t.proxy.mu.Lock()
	defer t.proxy.mu.Unlock()
	return t.message, t.message != Message{}
}

// Done is closed when the fault happened.
func (t *Trap) Done() <-chan struct{} { return t.fired }

// Release disarms the trap if it did not fire, and lets what a [Stall] holds go on.
func (t *Trap) Release() {
	t.proxy.mu.Lock()
	if t.proxy.trap == t {
		t.proxy.trap = nil
	}
	t.proxy.mu.Unlock()
	t.release.Do(func() { close(t.released) })
}

// springs tells whether the fault happens at the message. The proxy's lock is held.
func (t *Trap) springs(message Message) bool {
	if t.fault.From != FromEither && t.fault.From != message.From || t.fault.Match != nil && !t.fault.Match(message) {
		return false
	}
	if t.seen++; t.seen != t.fault.N {
		return false
	}
	t.message = message
	close(t.fired)
	return true
}
