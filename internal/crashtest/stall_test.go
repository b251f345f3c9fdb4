package crashtest_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"

	"github.com/watermill-inbox/inbox"
	"github.com/watermill-inbox/inbox/internal/wireproxy"
)

// TestStalledCommit has the COMMIT, or its reply, neither arrive nor fail. Config.CommitTimeout ends it, and with the MySQL
// driver readTimeout in its DSN; else these deliveries would never end.
func TestStalledCommit(t *testing.T) {
	t.Parallel()
	for _, stack := range stacks() {
		for _, outputs := range []bool{false, true} {
			for _, from := range []wireproxy.Direction{wireproxy.FromClient, wireproxy.FromServer} {
				side := "request"
				if from == wireproxy.FromServer {
					side = "reply"
				}
				t.Run(fmt.Sprintf("%s/outputs=%t/%s", stack.name, outputs, side), func(t *testing.T) {
					t.Parallel()
					s := newScene(t, stack, outputs)
					s.mustDeliver(watermill.NewUUID()) // so that the statements are prepared
					s.handler = s.newHandler(inbox.Config{CommitTimeout: stallTimeout})

					id := watermill.NewUUID()
					trap := s.proxy.Arm(stallAtCommit(from))
					defer trap.Release()
					err := s.deliver(id)
					at, fired := trap.Fired()
					switch {
					case !fired:
						t.Fatalf("the COMMIT did not stall:\n%s", s.proxy.Snapshot())
					case err == nil:
						t.Fatalf("acked although the COMMIT stalled at %s:\n%s", at, s.proxy.Snapshot())
					case !strings.HasPrefix(err.Error(), commitStep+": "):
						t.Errorf("the error does not name the COMMIT: %v", err)
					case stack.server.driver == postgreSQL.driver && !errors.Is(err, context.DeadlineExceeded):
						t.Errorf("the error does not say that CommitTimeout passed: %v", err)
					}
					trap.Release() // the COMMIT arrives late, unless the driver closed the connection
					s.redeliver(id, err)
					s.check(id)
				})
			}
		}
	}
}

// TestEveryStall stalls the connection at each message of a delivery in turn, or loses each that is a whole request. (A part
// of one is not lost alone: TCP loses nothing in the middle.) The message's context ends the delivery, and from the commit
// on CommitTimeout does.
func TestEveryStall(t *testing.T) {
	t.Parallel()
	for _, stack := range stacks() {
		for _, kind := range []wireproxy.Kind{wireproxy.Stall, wireproxy.Drop} {
			t.Run(stack.name+"/"+kind.String(), func(t *testing.T) {
				t.Parallel()
				// Of this stack's requests, only a COMMIT without outputs is one message.
				outputs := kind == wireproxy.Stall || stack.name != "pgx-cache-statement"
				s := newScene(t, stack, outputs)
				normal, impatient := s.timeout, s.newHandler(inbox.Config{CommitTimeout: stallTimeout})
				patient := s.handler
				fault := wireproxy.Fault{Kind: kind, From: wireproxy.FromClient}
				fault.Match = func(m wireproxy.Message) bool {
					switch {
					case kind == wireproxy.Drop:
						return m.Name == "Query" || strings.HasPrefix(m.Name, "COM_")
					case stack.name == "lib-pq": // it has nothing that ends a handler's own statement
						return m.Text != "" && !strings.Contains(m.Text, s.effects)
					}
					return true
				}
				for fault.N = 1; ; fault.N++ {
					s.mustDeliver(watermill.NewUUID()) // so that the connection is there, and knows the statements
					id := watermill.NewUUID()
					s.proxy.Reset()
					trap := s.proxy.Arm(fault)
					s.timeout, s.handler = stallTimeout, impatient
					err := s.deliver(id)
					s.timeout, s.handler = normal, patient
					trap.Release() // what was held arrives late, unless the driver closed the connection
					at, fired := trap.Fired()
					if err != nil && !steps.MatchString(err.Error()) {
						t.Errorf("the error names no step: %v", err)
					}
					s.redeliver(id, err)
					s.check(id)
					if t.Failed() {
						t.Fatalf("fault at message %d (%s), error: %v\n%s", fault.N, at, err, s.proxy.Snapshot())
					}
					if !fired {
						break
					}
				}
				if kind == wireproxy.Stall && fault.N < 4 || fault.N < 2 {
					t.Errorf("only %d messages were hit", fault.N-1)
				}
			})
		}
	}
}

// stallTimeout is long enough for a delivery that is not stalled; if it is not, the message is delivered again.
const stallTimeout = 500 * time.Millisecond

// stallAtCommit stalls the connection at the COMMIT, or at the first message of its reply.
func stallAtCommit(from wireproxy.Direction) wireproxy.Fault {
	isCommit := wireproxy.Statement("commit")
	sent := 0 // the connection that the COMMIT went over
	return wireproxy.Fault{Kind: wireproxy.Stall, Match: func(m wireproxy.Message) bool {
		if m.From == wireproxy.FromClient && (isCommit(m) || strings.HasSuffix(strings.ToLower(m.Text), ";commit")) {
			sent = m.Conn
			return from == wireproxy.FromClient
		}
		return m.From == from && m.From == wireproxy.FromServer && m.Conn == sent
	}}
}
