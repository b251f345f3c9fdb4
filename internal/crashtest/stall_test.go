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
					s.handler = s.newHandler(inbox.Config{CommitTimeout: 300 * time.Millisecond})

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
