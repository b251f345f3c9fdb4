// Package crashtest_test breaks the connection to the database at every message of a delivery in turn, and checks that
// the guarantee holds.
package crashtest_test

import (
	"context"
	"database/sql"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/watermill-inbox/inbox"
	"github.com/watermill-inbox/inbox/internal/wireproxy"
)

// deliveryKind is which delivery of the message meets the fault.
type deliveryKind string

const (
	first           deliveryKind = "first"
	firstAfterLogin deliveryKind = "first-after-login" // the connection has to be opened
	duplicate       deliveryKind = "duplicate"
)

var faults = []wireproxy.Fault{
	{Kind: wireproxy.CutBefore, From: wireproxy.FromClient}, // the request is lost
	{Kind: wireproxy.CutAfter, From: wireproxy.FromClient},  // the request is executed, its reply is lost
	{Kind: wireproxy.CutBefore, From: wireproxy.FromServer}, // a part of the reply is lost
	{Kind: wireproxy.CutAfter, From: wireproxy.FromServer},  // the connection is lost after the reply
}

// TestEverySingleFault breaks the connection at message n, for n = 1, 2, … until a delivery is not hit any more.
func TestEverySingleFault(t *testing.T) {
	t.Parallel()
	for _, stack := range stacks() {
		for _, kind := range []deliveryKind{first, firstAfterLogin, duplicate} {
			for _, outputs := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s/%s/outputs=%t", stack.name, kind, outputs), func(t *testing.T) {
					t.Parallel()
					s := newScene(t, stack, outputs)
					for _, fault := range faults {
						hits := 0
						for fault.N = 1; s.breakDelivery(kind, fault); fault.N++ {
							hits++
						}
						if hits < 2 {
							t.Errorf("only %d messages were hit by %s from %d", hits, fault.Kind, fault.From)
						}
						t.Logf("%s, from %d: %d faults", fault.Kind, fault.From, hits)
					}
				})
			}
		}
	}
}

// consumer is whose messages are delivered.
const consumer = "stock"

// scene is a consumer whose database is behind a proxy.
type scene struct {
	*testing.T
	stack   stack
	proxy   *wireproxy.Proxy
	client  *client
	control *sql.DB
	inbox   string // table
	effects string // table
	handler message.HandlerFunc
	outputs bool          // the handler returns a message
	timeout time.Duration // of a message's context

	published map[string][]string // UUIDs by the ID of their message
}

func newScene(t *testing.T, stack stack, outputs bool) *scene {
	t.Helper()
	s := &scene{T: t, stack: stack, outputs: outputs, timeout: 20 * time.Second, published: make(map[string][]string)}
	s.control = openDB(t, stack.server.driver, stack.server.dsn(t))
	s.inbox, s.effects = createTables(t, stack, s.control)
	proxy, dsn := wireproxy.Through(t, stack.server.dsn(t))
	s.proxy, s.client = proxy, stack.open(t, dsn, s.inbox)
	s.handler = s.newHandler(inbox.Config{CommitTimeout: time.Minute})
	return s
}

// newHandler puts the inbox before the handler. Nothing is marked as published: the marker's statements would come in
// between, and every duplicate shall find the outputs.
func (s *scene) newHandler(config inbox.Config) message.HandlerFunc {
	s.Helper()
	config.Consumer = consumer
	config.Store = &struct {
		inbox.Store
		inbox.TransientClassifier
	}{s.client.store, s.client.store}
	dedup, err := inbox.NewDeduplicator(config)
	if err != nil {
		s.Fatal(err)
	}
	return dedup.Middleware(func(msg *message.Message) ([]*message.Message, error) {
		if err := s.client.effect(msg.Context(), s.effects, msg.UUID); err != nil {
			return nil, fmt.Errorf("%s: %w", handlerStep, err)
		}
		if !s.outputs {
			return nil, nil
		}
		return message.Messages{message.NewMessage(watermill.NewUUID(), []byte("reserved"))}, nil
	})
}

// breakDelivery delivers a new message with the fault, and again until it is acked. It reports whether the fault happened.
func (s *scene) breakDelivery(kind deliveryKind, fault wireproxy.Fault) bool {
	s.Helper()
	s.mustDeliver(watermill.NewUUID()) // so that the connection is there, and knows the statements
	id := watermill.NewUUID()
	switch kind {
	case first:
	case firstAfterLogin:
		s.client.renew()
	case duplicate: // of a delivery whose publish failed
		s.mustDeliver(id)
		s.published[id] = nil
	}

	s.proxy.Reset()
	trap := s.proxy.Arm(fault)
	err := s.deliver(id)
	trap.Release()
	at, fired := trap.Fired()
	seen := s.proxy.Snapshot()
	failed := s.Failed()
	switch {
	case err != nil && !fired:
		s.Fatalf("failed without a fault: %v\n%s", err, seen)
	case err != nil:
		s.checkStep(err, at, seen)
	}
	s.redeliver(id, err)
	s.redeliver(id, s.deliver(id)) // on the connection that the fault left
	s.check(id)
	if s.Failed() && !failed {
		s.Fatalf("%s from %d at message %d (%s), delivery %s, error: %v\n%s", fault.Kind, fault.From, fault.N, at, kind, err, seen)
	}
	return fired
}

// deliver does what the router does: it publishes what the middleware returns, and acks, or else nacks.
func (s *scene) deliver(id string) error {
	s.Helper()
	ctx, cancel := context.WithTimeout(s.Context(), s.timeout)
	defer cancel()
	msg := message.NewMessage(id, []byte("order"))
	msg.SetContext(ctx)
	outputs, err := s.handler(msg)
	if err != nil {
		if len(outputs) > 0 {
			s.Errorf("messages returned beside the error %v", err)
		}
		return err
	}
	for _, output := range outputs {
		s.published[id] = append(s.published[id], output.UUID)
	}
	if n := s.count(s.effects, id); n != 1 {
		s.Errorf("acked with %d effects committed", n)
	}
	return nil
}

func (s *scene) mustDeliver(id string) {
	s.Helper()
	if err := s.deliver(id); err != nil {
		s.Fatalf("failed without a fault: %v\n%s", err, s.proxy.Snapshot())
	}
}

// redeliver delivers as the broker does after the delivery ended in err.
func (s *scene) redeliver(id string, err error) {
	s.Helper()
	for range 5 {
		if err == nil {
			return
		}
		err = s.deliver(id)
	}
	s.Fatalf("not acked after 5 redeliveries: %v\n%s", err, s.proxy.Snapshot())
}

// check checks the guarantee for a message that was acked.
func (s *scene) check(id string) {
	s.Helper()
	if effects, rows := s.count(s.effects, id), s.count(s.inbox, id); effects != 1 || rows != 1 {
		s.Errorf("%d effects and %d inbox rows, want one of each", effects, rows)
	}
	uuids := slices.Clone(s.published[id])
	if distinct := slices.Compact(slices.Sorted(slices.Values(uuids))); s.outputs && len(distinct) != 1 {
		s.Errorf("published the UUIDs %v, want one, at least once", uuids)
	}
	if n := s.client.inUse(); n != 0 {
		s.Errorf("%d connections were not given back", n)
	}
}

func (s *scene) count(table, id string) int {
	s.Helper()
	query := fmt.Sprintf("SELECT count(*) FROM %s WHERE message_id = '%s'", table, id) // drivers differ in placeholders
	var n int
	if err := s.control.QueryRowContext(s.Context(), query).Scan(&n); err != nil {
		s.Fatal(err)
	}
	return n
}

// What errors begin with, by the step that they happened in.
const (
	prepareStep = "inbox: prepare claim"
	beginStep   = "inbox: begin transaction"
	claimStep   = "inbox: claim key"
	handlerStep = "insert effect"
	sealStep    = "inbox: seal record"
	commitStep  = "inbox: commit"
)

var steps = regexp.MustCompile("^(" + strings.Join(
	[]string{prepareStep, beginStep, claimStep, handlerStep, sealStep, commitStep}, "|") + "): ")

// checkStep checks that the error names the step that failed: the one whose statement was the last that the client sent on
// the connection. After a reply that came whole, and at a Close, of which nobody reads the outcome, it may be the next one.
func (s *scene) checkStep(err error, at wireproxy.Message, seen wireproxy.Snapshot) {
	s.Helper()
	step := steps.FindStringSubmatch(err.Error())
	if step == nil {
		s.Errorf("the error names no step: %v", err)
		return
	}
	var sent string
	for _, message := range seen.Messages {
		if message.Conn == at.Conn && message.From == wireproxy.FromClient && message.Text != "" {
			sent = message.Text
		}
	}
	if at.From == wireproxy.FromServer || strings.HasSuffix(strings.ToUpper(at.Name), "CLOSE") {
		return
	}
	if want := s.stepOf(sent); !slices.Contains(want, step[1]) {
		s.Errorf("the error names another step than %v: %v", want, err)
	}
}

// stepOf returns the step that the statement belongs to, and those that are pipelined with it.
func (s *scene) stepOf(statement string) []string {
	upper := strings.ToUpper(strings.TrimSpace(statement))
	step := ""
	switch {
	case strings.Contains(statement, s.effects):
		step = handlerStep
	case strings.HasPrefix(upper, "BEGIN"), strings.HasPrefix(upper, "START TRANSACTION"), statement == "":
		step = beginStep // or the login
	case strings.HasPrefix(upper, "COMMIT"):
		step = commitStep
	case strings.Contains(upper, "SET PROCESSED_AT"):
		step = sealStep
	default:
		step = claimStep
	}
	for _, together := range s.stack.pipelined {
		if slices.Contains(together, step) {
			return together
		}
	}
	return []string{step}
}
