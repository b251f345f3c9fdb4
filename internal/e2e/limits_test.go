package e2e_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"

	"github.com/watermill-inbox/inbox"
)

func TestTwoHandlersOfOneMessageBothRun(t *testing.T) {
	t.Parallel()
	s := newShop(t, "sqlite")
	broker := newBroker()
	router := newRouter(t, newDeduplicator(t, inbox.Config{Store: s.store}).Middleware)
	router.AddConsumerHandler("first", "orders", broker, s.takeFromStock)
	router.AddConsumerHandler("second", "orders", broker, s.book)
	start(t, router)
	for range 3 {
		if err := broker.Publish("orders", message.NewMessage("id", []byte("id"))); err != nil {
			t.Fatal(err)
		}
	}
	wantCounts(t, s, map[string]int{allEffects: 1, allBookings: 1, allRows: 2})
}

// TestWritesBesideTheTransactionAreNotCovered is the control: what a handler writes through the database itself survives
// the rollback.
func TestWritesBesideTheTransactionAreNotCovered(t *testing.T) {
	t.Parallel()
	for _, store := range []string{"pgx", "stdlib", "mysql"} { // SQLite has one writer at a time
		t.Run(store, func(t *testing.T) {
			t.Parallel()
			s := newShop(t, store)
			broker := newBroker()
			router := newRouter(t, newDeduplicator(t, inbox.Config{Store: s.store}).Middleware)
			runs := 0
			router.AddConsumerHandler("handler", "orders", broker, func(msg *message.Message) error {
				runs++
				err := errors.Join(
					s.exec(msg.Context(), "INSERT INTO {effects} VALUES ('in the transaction')"),
					s.beside(msg.Context(), "INSERT INTO {effects} VALUES ('beside it')"),
				)
				if runs == 1 {
					err = errors.Join(err, errScripted)
				}
				return err
			})
			start(t, router)
			for range 2 {
				if err := broker.Publish("orders", message.NewMessage("id", nil)); err != nil {
					t.Fatal(err)
				}
			}
			wantCounts(t, s, map[string]int{
				allEffects + " WHERE id = 'in the transaction'": 1,
				allEffects + " WHERE id = 'beside it'":          2,
			})
		})
	}
}

// TestLossByAnEarlyAckIsLogged has messages acknowledged before their commit, which then fails.
func TestLossByAnEarlyAckIsLogged(t *testing.T) {
	t.Parallel()
	nop := func(h message.HandlerFunc) message.HandlerFunc { return h }
	for _, tt := range []struct {
		name       string
		outermost  message.HandlerMiddleware
		ackItself  bool
		alsoLogged string
	}{
		// GoChannel ends the context of a message that is acknowledged, so that it does not come to the handler.
		{name: "InstantAck", outermost: middleware.InstantAck},
		{name: "by the handler", outermost: nop, ackItself: true, alsoLogged: "acknowledged before its commit"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			s := newShop(t, "pgx")
			broker := newBroker()
			logger := watermill.NewCaptureLogger()
			dedup := newDeduplicator(t, inbox.Config{Store: s.store, Logger: logger})
			results := make(chan error, 10)
			router := newRouter(t, func(h message.HandlerFunc) message.HandlerFunc {
				return func(msg *message.Message) ([]*message.Message, error) {
					outputs, err := h(msg)
					results <- err
					return outputs, err
				}
			}, tt.outermost, dedup.Middleware)
			router.AddConsumerHandler("handler", "orders", broker, func(msg *message.Message) error {
				err := s.takeFromStock(msg)
				// The database fails before the commit.
				_ = s.exec(msg.Context(), "SELECT pg_terminate_backend(pg_backend_pid())")
				if tt.ackItself {
					msg.Ack()
				}
				return err
			})
			start(t, router)
			if err := broker.Publish("orders", message.NewMessage("lost", []byte("lost"))); err != nil {
				t.Fatal(err)
			}
			if err := <-results; err == nil {
				t.Error("no error")
			}
			wantCounts(t, s, map[string]int{allEffects: 0, allRows: 0})
			logged := fmt.Sprintf("%+v", logger.Captured()[watermill.ErrorLogLevel])
			for _, want := range []string{"will not deliver it again", "message_uuid:lost", tt.alsoLogged} {
				if !strings.Contains(logged, want) {
					t.Errorf("logged %s, without %q", logged, want)
				}
			}
			if len(results) != 0 {
				t.Error("delivered again")
			}
		})
	}
}
