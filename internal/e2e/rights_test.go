package e2e_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
	"github.com/go-sql-driver/mysql"

	"github.com/watermill-inbox/inbox"
	"github.com/watermill-inbox/inbox/outbox"
	"github.com/watermill-inbox/inbox/sqlstore"
)

// TestLeastRights has each part work as a database user who has the rights that the README says, and, where the README
// asks for more than one database needs, checks on PostgreSQL that none of them can be left out.
func TestLeastRights(t *testing.T) {
	t.Parallel()
	for _, part := range []struct {
		name   string
		rights []string // each a right, " ON " and a table
		work   func(t *testing.T, s *shop) error
	}{
		{"handlers", []string{"SELECT ON {inbox}", "INSERT ON {inbox}", "UPDATE ON {inbox}"}, handleAndReplay},
		{"cleanup", []string{"SELECT ON {inbox}", "UPDATE ON {inbox}", "DELETE ON {inbox}"}, cleanAndForget},
		{"outbox", []string{
			"SELECT ON {inbox}", "INSERT ON {inbox}", "UPDATE ON {inbox}", "INSERT ON watermill_{outbox}",
			"USAGE ON SEQUENCE watermill_{outbox}_offset_seq",
		}, handleIntoOutbox},
		{"relay", []string{"SELECT ON watermill_{outbox}", "UPDATE ON watermill_{outbox}", "DELETE ON watermill_{outbox}"}, relayOne},
	} {
		for _, store := range []string{"pgx", "stdlib", "mysql"} {
			t.Run(part.name+"/"+store, func(t *testing.T) {
				t.Parallel()
				owner := newShop(t, store)
				owner.createOutbox(t)
				work := func(rights []string) error {
					// There is something to work on, however the last time ended.
					if err := handleIntoOutbox(t, owner); err != nil {
						t.Fatal(err)
					}
					return part.work(t, owner.as(t, rights))
				}
				if err := work(part.rights); err != nil {
					t.Errorf("with all rights: %v", err)
				}
				for i := range part.rights {
					if store == "mysql" {
						break // it can do without some
					}
					without := slices.Delete(slices.Clone(part.rights), i, i+1)
					if err := work(without); err == nil {
						t.Errorf("it works without %s", part.rights[i])
					}
				}
			})
		}
	}
}

// as returns the shop as a user has it who has these rights alone.
func (s *shop) as(t *testing.T, rights []string) *shop {
	t.Helper()
	user := "e2e_" + strings.ToLower(watermill.NewULID())
	exec := func(query string) {
		t.Helper()
		if err := s.exec(context.WithoutCancel(t.Context()), query); err != nil {
			t.Fatal(err)
		}
	}
	as := &shop{Store: s.Store, Prefix: s.Prefix}
	switch s.Store {
	case "mysql":
		config, err := mysql.ParseDSN(s.DSN)
		if err != nil {
			t.Fatal(err)
		}
		config.User, config.Passwd = user, "secret"
		as.DSN = config.FormatDSN()
		exec("CREATE USER " + user + " IDENTIFIED BY 'secret'")
		t.Cleanup(func() { exec("DROP USER " + user) })
	default:
		as.DSN = s.DSN + "&role=" + user
		exec("CREATE ROLE " + user)
		t.Cleanup(func() {
			exec("DROP OWNED BY " + user)
			exec("DROP ROLE " + user)
		})
	}
	for _, right := range rights {
		if strings.Contains(right, "SEQUENCE") && s.Store == "mysql" {
			continue // it has none
		}
		exec("GRANT " + right + " TO " + user)
	}
	if err := as.open(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(as.close)
	return as
}

// handle runs a handler that returns a message, and takes longer than PostgreSQL's record may lie behind.
func handle(t *testing.T, config inbox.Config, id string) (err error) {
	t.Helper()
	keep := func(h message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) ([]*message.Message, error) {
			_, err = h(msg)
			return nil, nil
		}
	}
	broker := newBroker()
	router := newRouter(t, keep, newDeduplicator(t, config).Middleware)
	router.AddHandler("handler", "in", broker, "out", broker, func(*message.Message) ([]*message.Message, error) {
		time.Sleep(150 * time.Millisecond)
		return []*message.Message{message.NewMessage(watermill.NewUUID(), nil)}, nil
	})
	start(t, router)
	if err := broker.Publish("in", message.NewMessage(id, nil)); err != nil {
		t.Fatal(err)
	}
	return err
}

// handleAndReplay is a delivery, a duplicate, and the mark that its outputs were published.
func handleAndReplay(t *testing.T, s *shop) error {
	t.Helper()
	config := inbox.Config{Store: s.store, Consumer: "rights", StorePayload: true, Fingerprint: true}
	id := watermill.NewUUID()
	return errors.Join(
		handle(t, config, id),
		handle(t, config, id),
		s.store.(inbox.OutputsMarker).MarkOutputsPublished(t.Context(), []inbox.Key{{Consumer: "rights", MessageID: id}}),
	)
}

func handleIntoOutbox(t *testing.T, s *shop) error {
	t.Helper()
	publisher, err := outbox.NewPublisher(s.outbox())
	if err != nil {
		return err
	}
	config := inbox.Config{Store: s.store, Consumer: "rights", Outputs: inbox.OutputsOutbox, Outbox: publisher}
	return handle(t, config, watermill.NewUUID())
}

func cleanAndForget(t *testing.T, s *shop) error {
	t.Helper()
	store := s.store.(interface {
		DeleteExpired(ctx context.Context, age time.Duration, limit int) (int, error)
		OldestAge(ctx context.Context) (time.Duration, bool, error)
		CountStranded(ctx context.Context, olderThan time.Duration) (int64, error)
		ListStranded(ctx context.Context, params sqlstore.ListStrandedParams) ([]sqlstore.StrandedOutputs, error)
		Forget(ctx context.Context, key inbox.Key) error
	})
	_, _, oldest := store.OldestAge(t.Context())
	_, count := store.CountStranded(t.Context(), 0)
	_, list := store.ListStranded(t.Context(), sqlstore.ListStrandedParams{Limit: 1})
	_, expired := store.DeleteExpired(t.Context(), time.Hour, 1)
	return errors.Join(oldest, count, list, expired, store.Forget(t.Context(), inbox.Key{Consumer: "rights", MessageID: "id"}))
}

func relayOne(t *testing.T, s *shop) error {
	t.Helper()
	broker := gochannel.NewGoChannel(gochannel.Config{}, watermill.NopLogger{})
	relay, err := outbox.NewRelay(outbox.RelayConfig{Config: s.outbox(), DB: s.db, Publisher: broker})
	if err != nil {
		return err
	}
	relayed, err := relay.RunOnce(t.Context())
	if err == nil && relayed == 0 {
		t.Error("nothing was relayed")
	}
	return err
}
