package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"

	"github.com/watermill-inbox/inbox"
)

// publisherFunc is a publisher that a test scripts and inspects.
type publisherFunc struct {
	mu        sync.Mutex
	publish   func(attempt int, topic string, msgs []*message.Message) error
	attempts  int
	published []*message.Message
}

func (p *publisherFunc) Publish(topic string, msgs ...*message.Message) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.attempts++
	if p.publish != nil {
		if err := p.publish(p.attempts, topic, msgs); err != nil {
			return err
		}
	}
	p.published = append(p.published, msgs...)
	return nil
}

func (p *publisherFunc) Close() error { return nil }

// runRouter runs the messages through a router with an inbox, one after the other, each until it is acknowledged.
func runRouter(t *testing.T, dedup *inbox.Deduplicator, msgs ...*message.Message) {
	t.Helper()
	runRouterWith(t, dedup, &publisherFunc{}, func(msg *message.Message) ([]*message.Message, error) { return do(msg) }, msgs...)
}

func runRouterWith(t *testing.T, dedup *inbox.Deduplicator, out message.Publisher, h message.HandlerFunc, msgs ...*message.Message) {
	t.Helper()
	broker := gochannel.NewGoChannel(gochannel.Config{BlockPublishUntilSubscriberAck: true}, watermill.NopLogger{})
	router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
	if err != nil {
		t.Fatal(err)
	}
	router.AddMiddleware(middleware.CorrelationID, dedup.Middleware)
	router.AddHandler("router_handler", "in", broker, "out", out, h)
	ended := make(chan error)
	go func() { ended <- router.Run(context.Background()) }()
	<-router.Running()
	for _, msg := range msgs {
		if err := broker.Publish("in", msg); err != nil {
			t.Error(err)
		}
	}
	closeDeduplicator(t, dedup)
	if err := router.Close(); err != nil {
		t.Error(err)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// produce returns a handler with an effect and n outputs.
func produce(n int) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		if _, err := do(msg); err != nil {
			return nil, err
		}
		outputs := make([]*message.Message, n)
		for i := range outputs {
			outputs[i] = message.NewMessageWithContext(msg.Context(), fmt.Sprintf("out-%d", i), []byte{0xff, byte(i)})
			outputs[i].Metadata.Set("n", fmt.Sprint(i))
		}
		return outputs, nil
	}
}

func TestReplayPublishesUntilItSucceededOnce(t *testing.T) {
	t.Parallel()
	store := newFakeStore()
	dedup := newDeduplicator(t, store)
	out := &publisherFunc{publish: func(attempt int, topic string, msgs []*message.Message) error {
		if topic != "out" {
			t.Errorf("topic %q", topic)
		}
		if attempt <= 3 {
			return errors.New("broker down")
		}
		return nil
	}}
	in := message.NewMessage("id", nil)
	middleware.SetCorrelationID("correlation", in)
	runRouterWith(t, dedup, out, produce(2), in, message.NewMessage("id", nil))

	if out.attempts != 4 || len(store.effects) != 1 {
		t.Errorf("%d publish attempts, want 4; effects %q", out.attempts, store.effects)
	}
	if len(out.published) != 2 {
		t.Fatalf("%d messages published", len(out.published))
	}
	for i, msg := range out.published {
		if msg.UUID != fmt.Sprintf("out-%d", i) || string(msg.Payload) != string([]byte{0xff, byte(i)}) ||
			msg.Metadata.Get("n") != fmt.Sprint(i) || middleware.MessageCorrelationID(msg) != "correlation" {
			t.Errorf("message %d: %+v", i, msg)
		}
		if err := msg.Context().Err(); err != nil {
			t.Errorf("message %d: context: %v", i, err)
		}
		if _, ok := inbox.TxFromContext[*nativeTx](msg.Context()); ok {
			t.Errorf("message %d carries the dead transaction", i)
		}
	}
	if row := store.row("id"); len(row.Outputs) != 0 || len(store.marked) != 1 {
		t.Errorf("not marked as published: %d outputs, marked %v", len(row.Outputs), store.marked)
	}
}

func TestOnlyAnAckAfterTheMiddlewareProvesThePublish(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name    string
		msg     *message.Message
		wrap    func(message.HandlerFunc) message.HandlerFunc
		settle  func(*message.Message)
		marked  bool
		pending bool
	}{
		{name: "ack", msg: message.NewMessage("id", nil), settle: func(m *message.Message) { m.Ack() }, marked: true},
		{name: "nack", msg: message.NewMessage("id", nil), settle: func(m *message.Message) { m.Nack() }},
		{name: "instant ack", msg: message.NewMessage("id", nil), wrap: middleware.InstantAck},
		{name: "no ack channel", msg: &message.Message{UUID: "id"}, settle: func(m *message.Message) { m.Ack() }},
		{name: "never settled", msg: message.NewMessage("id", nil), pending: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				store := newFakeStore()
				dedup := newDeduplicator(t, store)
				h := dedup.Middleware(produce(1))
				if tt.wrap != nil {
					h = tt.wrap(h)
				}
				produced, err := h(tt.msg)
				if err != nil || len(produced) != 1 {
					t.Fatalf("%v, %v", produced, err)
				}
				time.Sleep(time.Second)
				if len(store.marked) > 0 {
					t.Error("marked before it was acknowledged")
				}
				if tt.settle != nil {
					tt.settle(tt.msg)
				}
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				if err := dedup.Close(ctx); (err != nil) != tt.pending {
					t.Errorf("Close: %v", err)
				}
				if marked := len(store.marked) == 1; marked != tt.marked {
					t.Errorf("marked: %t", marked)
				}
			})
		})
	}
}

func TestMarkingSurvivesAStoreThatFails(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		store := newFakeStore()
		failures := 2
		store.onMark = func() error {
			if failures--; failures >= 0 {
				return errors.New("database down")
			}
			return nil
		}
		dedup := newDeduplicator(t, store)
		for i := range 500 { // more than a batch
			msg := message.NewMessage(fmt.Sprint(i), nil)
			if _, err := dedup.Middleware(produce(1))(msg); err != nil {
				t.Fatal(err)
			}
			msg.Ack()
		}
		closeDeduplicator(t, dedup)
		if len(store.marked) != 500 {
			t.Errorf("%d marked", len(store.marked))
		}
	})
}

// TestMarkingGoesOnSoonAfterALostConnection: what a process that dies had not marked stays stranded.
func TestMarkingGoesOnSoonAfterALostConnection(t *testing.T) {
	t.Parallel()
	for failures, within := range map[int]time.Duration{1: 250 * time.Millisecond, 8: 10 * time.Second} {
		synctest.Test(t, func(t *testing.T) {
			store := newFakeStore()
			attempts := 0
			store.onMark = func() error {
				if attempts++; attempts <= failures {
					return errors.New("connection lost")
				}
				return nil
			}
			dedup := newDeduplicator(t, store)
			msg := newMessage("id")
			if _, err := dedup.Middleware(produce(1))(msg); err != nil {
				t.Fatal(err)
			}
			msg.Ack()
			time.Sleep(within)
			synctest.Wait()
			if len(store.marked) != 1 || attempts != failures+1 {
				t.Errorf("%d failures: %d marked after %s and %d attempts", failures, len(store.marked), within, attempts)
			}
			closeDeduplicator(t, dedup)
		})
	}
}

// TestMarkDoesNotReachTheNextLifeOfItsKey: between an acknowledgment and its mark, the key may be forgotten and processed
// again, with outputs of its own.
func TestMarkDoesNotReachTheNextLifeOfItsKey(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		store := newFakeStore()
		dedup := newDeduplicator(t, store)
		h := dedup.Middleware(produce(1))
		first := newMessage("id")
		if _, err := h(first); err != nil {
			t.Fatal(err)
		}
		first.Ack()
		delete(store.rows, inbox.Key{Consumer: consumer, MessageID: "id"})
		second := newMessage("id")
		if _, err := h(second); err != nil {
			t.Fatal(err)
		}
		second.Nack() // their publish failed
		time.Sleep(time.Second)
		if row := store.row("id"); len(row.Outputs) != 1 {
			t.Error("outputs that were not published are marked")
		}
		third := newMessage("id")
		if produced, err := h(third); err != nil || len(produced) != 1 {
			t.Errorf("the duplicate returned %d messages, error %v", len(produced), err)
		}
		third.Ack()
		closeDeduplicator(t, dedup)
		if row := store.row("id"); len(row.Outputs) != 0 {
			t.Error("not marked as published")
		}
	})
}

func TestCloseCanBeCalledAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		store := newFakeStore()
		store.onMark = func() error { return errors.New("database down") }
		dedup := newDeduplicator(t, store)
		msg := newMessage("id")
		if _, err := dedup.Middleware(produce(1))(msg); err != nil {
			t.Fatal(err)
		}
		msg.Ack()
		for range 2 {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			err := dedup.Close(ctx)
			cancel()
			if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "of 1 message") {
				t.Errorf("Close: %v", err)
			}
		}

		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- dedup.Close(ctx) }()
		synctest.Wait()
		store.onMark = nil
		cancel() // stops the work that both calls wait for
		if err := dedup.Close(t.Context()); err != nil {
			t.Errorf("Close: %v", err)
		}
		if err := <-ended; err != nil && !errors.Is(err, context.Canceled) {
			t.Errorf("Close: %v", err)
		}
		if len(store.marked) != 1 {
			t.Errorf("%d marked", len(store.marked))
		}
	})
}

func TestMarkerForgetsMessagesThatAreNeverSettled(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		dedup := newDeduplicator(t, newFakeStore())
		msg := newMessage("id")
		ctx, cancel := context.WithCancel(msg.Context())
		msg.SetContext(ctx)
		if _, err := dedup.Middleware(produce(1))(msg); err != nil {
			t.Fatal(err)
		}
		cancel()
		if _, err := dedup.Middleware(produce(1))(newMessage("other")); err != nil {
			t.Fatal(err)
		}
		// The bubble ends only when the marker's goroutine did, which it does without Close.
		time.Sleep(2 * time.Hour)
		closeDeduplicator(t, dedup)
	})
}

func TestStoreThatCannotMarkPublishesWithEveryDuplicate(t *testing.T) {
	t.Parallel()
	dedup := newDeduplicator(t, struct{ inbox.Store }{newFakeStore()}, func(c *inbox.Config) { c.TransientRetries = 1 })
	for range 3 {
		msg := message.NewMessage("id", nil)
		produced, err := dedup.Middleware(produce(1))(msg)
		if err != nil || len(produced) != 1 || produced[0].UUID != "out-0" {
			t.Errorf("%v, %v", produced, err)
		}
		msg.Ack()
	}
	closeDeduplicator(t, dedup)
}

func TestOddOutputs(t *testing.T) {
	t.Parallel()
	deliver := func(t *testing.T, h message.HandlerFunc) ([]*message.Message, *fakeStore, error) {
		t.Helper()
		store := newFakeStore()
		dedup := newDeduplicator(t, store)
		msg := newMessage("id")
		produced, err := dedup.Middleware(h)(msg)
		msg.Ack()
		closeDeduplicator(t, dedup)
		return produced, store, err
	}

	t.Run("empty slice", func(t *testing.T) {
		t.Parallel()
		produced, store, err := deliver(t, func(*message.Message) ([]*message.Message, error) { return []*message.Message{}, nil })
		if err != nil || len(produced) != 0 || store.row("id") == nil {
			t.Errorf("%v, %v", produced, err)
		}
	})
	t.Run("nil element", func(t *testing.T) {
		t.Parallel()
		produced, store, err := deliver(t, func(*message.Message) ([]*message.Message, error) {
			return []*message.Message{message.NewMessage("a", nil), nil}, nil
		})
		if err == nil || !strings.Contains(err.Error(), "2 of 2 is nil") || produced != nil || store.row("id") != nil {
			t.Errorf("%v, %v", produced, err)
		}
	})
	t.Run("no UUID", func(t *testing.T) {
		t.Parallel()
		store := newFakeStore()
		h := newDeduplicator(t, struct{ inbox.Store }{store}).Middleware(func(*message.Message) ([]*message.Message, error) {
			return []*message.Message{{Payload: []byte("x")}}, nil
		})
		first, err := h(newMessage("id"))
		if err != nil {
			t.Fatal(err)
		}
		again, err := h(newMessage("id"))
		if err != nil {
			t.Fatal(err)
		}
		if first[0].UUID == "" || first[0].UUID != again[0].UUID {
			t.Errorf("UUIDs %q, %q", first[0].UUID, again[0].UUID)
		}
		if first[0].Metadata == nil || again[0].Metadata == nil {
			t.Error("metadata nil")
		}
	})
	t.Run("the incoming message itself", func(t *testing.T) {
		t.Parallel()
		in := newMessage("id")
		in.Metadata.Set("name", "value")
		store := newFakeStore()
		dedup := newDeduplicator(t, store)
		produced, err := dedup.Middleware(message.PassthroughHandler)(in)
		if err != nil || len(produced) != 1 {
			t.Fatalf("%v, %v", produced, err)
		}
		out := produced[0]
		if out == in || !out.Equals(in) || out.Context().Value(ctxKey{}) != "former" {
			t.Errorf("got %+v", out)
		}
		in.Ack()
		if isClosed(out.Acked()) {
			t.Error("shares the acknowledgment")
		}
		closeDeduplicator(t, dedup)
	})
}

func TestOutputsReject(t *testing.T) {
	t.Parallel()
	store := newFakeStore()
	dedup := newDeduplicator(t, store, func(c *inbox.Config) { c.Outputs = inbox.OutputsReject })
	if produced, err := dedup.Middleware(produce(1))(newMessage("id")); err == nil || produced != nil || len(store.rows) != 0 {
		t.Errorf("%v, %v", produced, err)
	}
	if _, err := dedup.Middleware(produce(0))(newMessage("id")); err != nil {
		t.Errorf("no messages: %v", err)
	}
}

func TestOutputsOutbox(t *testing.T) {
	t.Parallel()
	store := newFakeStore()
	fail := true
	outbox := &publisherFunc{publish: func(_ int, topic string, msgs []*message.Message) error {
		for _, msg := range msgs {
			tx, ok := inbox.TxFromContext[*nativeTx](msg.Context())
			if !ok || tx.closed {
				t.Error("not in the transaction")
			}
			tx.Do(topic + "/" + msg.UUID)
		}
		if fail {
			fail = false
			return errors.New("outbox: scripted")
		}
		return nil
	}}
	dedup := newDeduplicator(t, store, func(c *inbox.Config) { c.Outputs, c.Outbox = inbox.OutputsOutbox, outbox })
	direct := &publisherFunc{}
	runRouterWith(t, dedup, direct, produce(2), message.NewMessage("id", nil), message.NewMessage("id", nil))

	if got := strings.Join(store.effects, " "); got != "effect of id out/out-0 out/out-1" {
		t.Errorf("effects %q", got)
	}
	if direct.attempts != 0 || len(store.row("id").Outputs) != 0 {
		t.Errorf("%d direct publishes, %d recorded", direct.attempts, len(store.row("id").Outputs))
	}
	if _, err := dedup.Middleware(produce(1))(newMessage("no topic")); err == nil || !strings.Contains(err.Error(), "publish topic") {
		t.Errorf("no topic: %v", err)
	}
}
