package e2e_test

import (
	"testing"

	"github.com/watermill-inbox/inbox/internal/testenv"
	"github.com/watermill-inbox/inbox/internal/testserver"
)

func startServer(t *testing.T, name string, start func() (*testserver.Server, error)) *testserver.Server {
	t.Helper()
	server, err := start()
	if testserver.IsMissing(err) {
		testenv.Missing(t, name, err.Error())
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(server.Remove)
	return server
}
